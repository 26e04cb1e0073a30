"""torchtitan's checkpoint manager over a run of Holdfast.

A step holds `model`, `optimizer`, `lr_scheduler`, `dataloader`, `train_state`, and a mark that says what it holds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
)
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem

import holdfast
from holdfast.errors import CheckpointError, InvalidError, MissingError
from holdfast.integrations.host import MARK
from holdfast.integrations.torchtitan.framework import HOST
from holdfast.integrations.torchtitan.initial import load_elsewhere, load_hugging_face, require_no_other_steps
from holdfast.integrations.torchtitan.model import TitanModel
from holdfast.integrations.torchtitan.positions import position_of
from holdfast.settings import Settings

logger = logging.getLogger(__name__)

_CONTENT = "content"
_WHOLE = "whole training"
_MODEL = "model alone"
_HUGGING_FACE = "model alone, under the names of Hugging Face"

_MODES = ("disabled", "async", "async_with_pinned_mem")


class HoldfastManager(BaseCheckpointManager):
    """Saves the steps of a torchtitan training with Holdfast, and resumes from the newest valid one.

    torchtitan makes it from `config.checkpoint`, and calls its methods on every rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Fields of torchtitan's own managers, and those of Holdfast.

        Raises:
            InvalidError: A value is wrong, or names what is not covered.
            ValueError: torchtitan refuses a value.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """When a save returns: once it is committed; once the state is copied, so that training may change it; at once,
        with copies until the next optimizer step (`Settings.staging="lazy"`). The last step is always awaited."""

        settings: Settings = field(default_factory=Settings)
        """How Holdfast saves and loads. `settings.failed_saves_max` ends a training in which every save fails."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            mode: Any = str(self.async_mode).lower()  # As torchtitan takes it.
            if mode not in _MODES:
                raise InvalidError(f"checkpoint.async_mode={self.async_mode!r}; expected one of {', '.join(_MODES)}")
            self.async_mode = mode
            if not isinstance(self.settings, Settings):
                raise InvalidError(f"checkpoint.settings={str(self.settings)[:80]!r}; expected holdfast.Settings(…)")
            if self.initial_load_in_hf_quantized:
                raise InvalidError(
                    "checkpoint.initial_load_in_hf_quantized: HoldfastManager does not dequantize weights; expected "
                    "False. Dequantize the folder first, or load it once with torchtitan's CheckpointManager"
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, object],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Open the folder as the root of a run. A collective: every rank makes one.

        Raises:
            InvalidError: The config does not fit the training.
        """
        self.enable = config.enable
        if not self.enable:
            return
        self.folder: str = filesystem.join(base_folder, config.folder)
        self.save_future: Any = None
        self.failed_saves = 0
        """Background saves that failed on this rank; each is in the log."""
        self._config, self._adapter = config, sd_adapter
        self._mark = HOST.mark()
        self._model = TitanModel(model_parts)
        self.states: dict[str, object] = {
            **states,
            MODEL: self._model,
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        self._require_covered(config)
        self._latest: holdfast.SaveHandle | None = None
        self._unraised: list[CheckpointError] = []
        self._to_export: int | None = None
        self._is_closed = False
        self._manager = holdfast.CheckpointManager(
            self.folder,
            keep_last=config.keep_latest_k or None,
            preemption=False,  # torchtitan leaves signals to the launcher.
            settings=_settings_of(config),
        )
        logger.info("HoldfastManager saves to %s and resumes from it", self.folder)

    def _require_covered(self, config: Config) -> None:
        unknown = [key for key in config.exclude_from_loading if key not in self.states]
        if unknown:
            raise InvalidError(
                f"checkpoint.exclude_from_loading: {', '.join(unknown)}; expected some of {', '.join(self.states)}."
                " Remove it"
            )
        lost = [
            key
            for key, value in self.states.items()
            if value is not None and not isinstance(value, torch.Tensor) and not hasattr(value, "load_state_dict")
        ]
        if lost:
            raise InvalidError(
                f"states: {', '.join(lost)}: a load could not set this value in the training; expected objects with "
                "state_dict and load_state_dict, or tensors. Give the object that holds it these methods"
            )
        if config.last_save_in_hf and self._adapter is None:
            raise InvalidError(
                "checkpoint.last_save_in_hf: torchtitan has no adapter between this model and Hugging Face; expected a "
                "model with a state_dict_adapter. Set last_save_in_hf=False"
            )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        with structured_logger.log_trace_span("checkpoint_save"), torch.no_grad():
            structured_logger.add_step_tag("checkpoint_save")
            state = self._last_state() if last_step else self._whole_state()
            handle = self._manager.save(curr_step, state)
            self._latest, self.save_future = handle, handle.committed
            handle.committed.add_done_callback(self._note_ended)
            if last_step or self._config.async_mode == "disabled":
                self._wait_for_saving()
            if last_step and self._config.last_save_in_hf:
                self._to_export = curr_step
        return True

    def _is_due(self, step: int, last_step: bool) -> bool:
        config = self._config
        if config.load_only:
            return False
        is_first = step == 1 and config.enable_first_step_checkpoint
        return last_step or is_first or step % config.interval == 0

    def _note_ended(self, committed: Any) -> None:
        if committed.exception() is not None:
            self.failed_saves += 1

    def _whole_state(self) -> dict[str, object]:
        """Return the state of the whole training."""
        state = {key: value for key, value in self.states.items() if value is not None}
        state[MODEL] = self._model.tensors()
        if DATALOADER in state:
            state[DATALOADER] = position_of(state[DATALOADER])
        inner = getattr(state.get(OPTIMIZER), "optimizers", [])
        if self._config.async_mode == "async_with_pinned_mem" and len(inner) == 1:
            # The names are the same. A container may change weights between steps, so none is saved lazily.
            state[OPTIMIZER] = inner[0]
        return {MARK: {**self._mark, _CONTENT: _WHOLE}, **state}

    def _last_state(self) -> dict[str, object]:
        """Return the state of the last step: the whole training, or the model in the dtype of the export."""
        config = self._config
        if not config.last_save_model_only:
            return self._whole_state()
        tensors = self._model.state_dict() if config.last_save_in_hf else self._model.tensors()
        dtype = getattr(torch, config.export_dtype)
        # Names that share a tensor share the cast one.
        cast = {id(each): each.to(dtype) if each.is_floating_point() else each for each in tensors.values()}
        tensors = {name: cast[id(each)] for name, each in tensors.items()}
        if config.last_save_in_hf:
            tensors = self._adapter.to_hf(tensors)
        content = _HUGGING_FACE if config.last_save_in_hf else _MODEL
        return {MARK: {**self._mark, _CONTENT: content}, MODEL: tensors}

    def _load(self, step: int = -1) -> bool:
        with structured_logger.log_trace_span("checkpoint_load"), torch.no_grad():
            try:
                return self._resume(None if step == -1 else step) or self._load_initially()
            except MissingError as error:
                if step == -1:
                    raise
                raise MissingError(f"--checkpoint.load_step={step} is not found: {error}") from error

    def _resume(self, step: int | None) -> bool:
        """Fill the training from a step of the folder, or from its newest valid one; return whether it has any.

        Raises:
            InvalidError: The step does not fit the training, or holds the model alone.
            ConflictError: Another integration, or a job without one, saves in the folder.
        """
        whole = self._whole_state()
        state = {key: value for key, value in whole.items() if key not in self._config.exclude_from_loading}
        try:
            loaded = self._manager.load(state, step)
        except InvalidError as error:
            found, content = self._find(step)
            if found == 0 and content in (_WHOLE, _MODEL):
                # A seed, made on one rank: its optimizer has not stepped.
                return self._manager.load({MODEL: self._model.tensors()}, step) is not None
            if found is None or content == _WHOLE:
                raise
            raise self._less_than_whole(found, content) from error
        if loaded is not None:
            self._require_own_mark(state[MARK], step)
        return loaded is not None

    def _find(self, step: int | None) -> tuple[int | None, str]:
        """Return the step that a load would take, and what it holds. Reads no tensor.

        Raises:
            ConflictError: Another integration, or a job without one, saves in the folder.
        """
        about: dict[str, Any] = {MARK: {}}
        try:
            found = self._manager.load(about, step)
        except InvalidError:
            self._require_own_mark({}, step)
            raise
        if found is not None:
            self._require_own_mark(about[MARK], step)
        return found, about[MARK].get(_CONTENT, "")

    def _require_own_mark(self, mark: Any, step: int | None) -> None:
        if mark.get("name") != HOST.integration:
            named = "latest" if step is None else step
            HOST.require_own_root(holdfast.open_checkpoint(self.folder, step=named, settings=self._config.settings))

    def _less_than_whole(self, step: int, content: str) -> InvalidError:
        earlier = [number for number in self._manager.steps() if number < step]
        go_on = f"To train on, set load_step={earlier[-1]} if that step is whole, " if earlier else "To train on, "
        return InvalidError(
            f"{self.folder}: step {step} holds the {content}, as last_save_model_only saved it; expected a whole "
            f"training to resume. {go_on}or choose another folder and begin from these weights with initial_load_path"
        )

    def _load_initially(self) -> bool:
        """Fill a training whose folder has no step yet; return whether the config says from where."""
        config = self._config
        path = config.initial_load_path
        if not path and config.initial_load_in_hf:
            path = getattr(self._adapter, "hf_assets_path", None)
            if not path:
                raise InvalidError(
                    "checkpoint.initial_load_in_hf: neither initial_load_path nor hf_assets_path names a folder; "
                    "expected one of them. Set initial_load_path"
                )
        if not path:
            require_no_other_steps(self.folder)
            logger.info("%s has no step yet, and there is no initial_load_path: training begins anew", self.folder)
            return False
        logger.info("Loading from %s", path)
        if config.initial_load_in_hf:
            load_hugging_face(path, self._model, self._adapter, config.settings)
            return True
        rest = {} if config.initial_load_model_only else self._whole_state()
        rest = {key: value for key, value in rest.items() if key not in (MARK, MODEL, *config.exclude_from_loading)}
        load_elsewhere(path, self._model, rest, config.settings)
        return True

    def _maybe_wait_for_staging(self) -> None:
        handle = self._latest
        if handle is None or handle.staged.done():
            return
        try:
            handle.wait("staged")
        except CheckpointError as error:
            # Training goes on after a failed save. `close` raises it.
            self._unraised.append(error)
            logger.error("%s failed: %s: %s", handle.name, type(error).__name__, error)

    def _wait_for_saving(self) -> None:
        handle, self.save_future = self._latest, None
        if handle is not None:
            handle.wait()

    def _close(self) -> None:
        """Wait for the saves in flight and for the deletion of old steps.

        Raises:
            CheckpointError: A save failed, and no call has raised its error yet; only logged if an exception ends the
                training already.
        """
        if not hasattr(self, "_manager") or self._is_closed:
            return
        self._is_closed = True
        is_unwinding = sys.exception() is not None
        failures = self._unraised
        try:
            self._manager.close()
        except CheckpointError as error:
            failures.append(error)
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if self._to_export is not None and is_first:
            self._export(self._to_export)
        if not failures:
            return
        if not is_unwinding:
            raise failures[0]
        logger.error("%d saves failed; the first error: %s", self.failed_saves, failures[0])

    def _export(self, step: int) -> None:
        """Write the last step as a folder of Hugging Face, where torchtitan's own manager writes it."""
        target = filesystem.join(self.folder, f"step-{step}")
        holdfast.export(self.folder, PurePath(target), to="safetensors", step=step, settings=self._config.settings)
        logger.info("Step %d is exported to %s", step, target)


def _settings_of(config: HoldfastManager.Config) -> Settings:
    if config.async_mode == "disabled":
        return replace(config.settings, arena_bytes_max=0)  # The call writes, so nothing is copied first.
    if config.async_mode == "async_with_pinned_mem":
        return replace(config.settings, staging="lazy")
    return config.settings
