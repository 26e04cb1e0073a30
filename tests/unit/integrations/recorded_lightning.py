"""The shapes of Lightning 2.6.6 that `holdfast.integrations.lightning` meets, recorded from the real classes.

Each class has the methods and fields that the integration calls or overrides, with the parameters of the real ones.
`make integrations FRAMEWORK=lightning` compares them (tests/integrations/lightning/test_recorded.py).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from fsspec.core import url_to_fs

VERSION = "2.6.6"


class CheckpointIO:
    def save_checkpoint(self, checkpoint, path, storage_options=None): ...

    def load_checkpoint(self, path, map_location=None, weights_only=None): ...

    def remove_checkpoint(self, path): ...

    def teardown(self): ...


class TorchCheckpointIO(CheckpointIO):
    """Returns what it was asked for: the real one reads a file of torch."""

    def load_checkpoint(self, path, map_location=lambda storage, loc: storage, weights_only=None):
        return {"read_by_lightning": path, "weights_only": weights_only}


def get_filesystem(path, **kwargs):
    return url_to_fs(str(path), **kwargs)[0]


class LightningOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer


class TrainerFn(Enum):
    FITTING = "fit"
    TESTING = "test"


class TrainerStrategy:
    """What the strategies for sharded models have of Trainer's `Strategy`, as one rank."""

    global_rank = 0
    world_size = 1
    is_global_zero = True

    def __init__(self):
        self.model: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lightning_module: Any = SimpleNamespace(
            strict_loading=True, trainer=SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
        )
        self.is_torn_down = False

    def broadcast(self, obj, src=0):
        return obj

    def barrier(self, name=None): ...

    def lightning_module_state_dict(self): ...

    def optimizer_state(self, optimizer): ...

    def load_model_state_dict(self, checkpoint, strict=True): ...

    def load_optimizer_state_dict(self, checkpoint): ...

    def save_checkpoint(self, checkpoint, filepath, storage_options=None): ...

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        return {"read_by_lightning": checkpoint_path, "weights_only": weights_only}

    def remove_checkpoint(self, filepath): ...

    def teardown(self):
        self.is_torn_down = True


class TrainerModelParallelStrategy(TrainerStrategy):
    def __init__(
        self,
        data_parallel_size="auto",
        tensor_parallel_size="auto",
        save_distributed_checkpoint=True,
        process_group_backend=None,
        timeout=None,
    ):
        super().__init__()


class TrainerFSDPStrategy(TrainerStrategy):
    def __init__(self, **options):
        super().__init__()


class FabricModelParallelStrategy:
    """What Fabric's strategy for sharded models has, as one rank."""

    global_rank = 0
    world_size = 1
    is_global_zero = True

    def __init__(
        self,
        parallelize_fn,
        data_parallel_size="auto",
        tensor_parallel_size="auto",
        save_distributed_checkpoint=True,
        process_group_backend=None,
        timeout=None,
    ):
        self.parallelize_fn = parallelize_fn

    def broadcast(self, obj, src=0):
        return obj

    def barrier(self, *args, **kwargs): ...

    def save_checkpoint(self, path, state, storage_options=None, filter=None): ...

    def load_checkpoint(self, path, state=None, strict=True, weights_only=None):
        return {"read_by_lightning": path, "weights_only": weights_only}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "lightning.fabric.plugins.io.checkpoint_io": {"CheckpointIO": CheckpointIO},
    "lightning.fabric.plugins.io.torch_io": {"TorchCheckpointIO": TorchCheckpointIO},
    "lightning.fabric.utilities.cloud_io": {"get_filesystem": get_filesystem},
    "lightning.fabric.strategies": {"ModelParallelStrategy": FabricModelParallelStrategy},
    "lightning.pytorch.core.optimizer": {"LightningOptimizer": LightningOptimizer},
    "lightning.pytorch.strategies": {
        "FSDPStrategy": TrainerFSDPStrategy,
        "ModelParallelStrategy": TrainerModelParallelStrategy,
    },
    "lightning.pytorch.trainer.states": {"TrainerFn": TrainerFn},
}
"""Modules of Lightning by name, and what the integration imports of each."""


def recorded_modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the modules under their names, parents first."""
    names = {name.rsplit(".", levels)[0] for name in SHAPES for levels in range(name.count(".") + 1)}
    for name in sorted(names):
        module = types.ModuleType(name)
        vars(module).update(SHAPES.get(name, {}))
        yield name, module


def functions_of(shape: Any) -> Mapping[str, Callable[..., Any]]:
    """Return the methods of a class that were recorded, with those of its recorded bases; or the function itself."""
    if not isinstance(shape, type):
        return {shape.__name__: shape}
    found: dict[str, Callable[..., Any]] = {}
    for kind in reversed(shape.__mro__):
        found |= {name: value for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    return found
