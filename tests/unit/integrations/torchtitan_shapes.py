"""What HoldfastManager takes from torchtitan 0.3.0, recorded, for environments without torchtitan.

`tests/integrations/torchtitan/test_shapes.py` compares it with the real one under `make integrations`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest

VERSION = "0.3.0"
IS_INSTALLED = importlib.util.find_spec("torchtitan") is not None


class Configurable:
    """A class that its nested `Config` builds."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **objects: object) -> Any:
            assert self._owner is not None
            return self._owner(config=replace(self), **objects)

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.__dict__["Config"].__dict__, "expected @dataclass(kw_only=True, slots=True)"
            cls.Config._owner = cls


class BaseCheckpointManager(Configurable, ABC):
    """The public methods ask whether checkpoints are enabled; a manager has the methods with an underscore."""

    enable: bool
    save_future: Any

    def load(self, step: int = -1) -> bool:
        return self._load(step) if self.enable else False

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._save(curr_step, last_step) if self.enable else False

    def maybe_wait_for_staging(self) -> None:
        if self.enable:
            self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def close(self) -> None:
        if getattr(self, "enable", False):
            self._close()

    @abstractmethod
    def _load(self, step: int = -1) -> bool: ...

    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        create_seed_checkpoint: bool = False
        load_only: bool = False

        def __post_init__(self) -> None:
            if self.keep_latest_k == 1:
                raise ValueError("expected at least 2")


@contextmanager
def log_trace_span(name: str) -> Iterator[None]:
    yield


def add_step_tag(tag: str) -> None: ...


def join(base: str, name: str) -> str:
    return name if "://" in name else os.path.join(base, name)


CONSTANTS = {"MODEL": "model", "OPTIMIZER": "optimizer", "LR_SCHEDULER": "lr_scheduler", "DATALOADER": "dataloader"}

MODULES: dict[str, dict[str, object]] = {
    "torchtitan": {},
    "torchtitan.components": {},
    "torchtitan.components.checkpointer": {"BaseCheckpointManager": BaseCheckpointManager, **CONSTANTS},
    "torchtitan.observability": {},
    "torchtitan.observability.structured_logger": {"log_trace_span": log_trace_span, "add_step_tag": add_step_tag},
    "torchtitan.tools": {},
    "torchtitan.tools.filesystem": {"join": join},
}


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Make the shapes importable as torchtitan, if it is not installed."""
    if IS_INSTALLED:
        return
    version_of = importlib.metadata.version
    patch.setattr(importlib.metadata, "version", lambda name: VERSION if name == "torchtitan" else version_of(name))
    for name, content in MODULES.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
