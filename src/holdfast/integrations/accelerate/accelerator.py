"""`Accelerator`, whose `save_state` and `load_state` go through Holdfast."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin, prepare_data_loader
from accelerate.utils import DistributedType

import holdfast
from holdfast import PerRank, SaveHandle, Settings
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from holdfast.integrations.accelerate import folders
from holdfast.integrations.accelerate.hooks import loaded_by_hooks, saved_by_hooks
from holdfast.integrations.accelerate.ranks import agreed, together
from holdfast.integrations.accelerate.state import (
    SavedRecord,
    kept_by,
    say_other_processes,
    skips,
    state_to_load,
    state_to_save,
)

logger = logging.getLogger(__name__)

Patterns = Sequence[str] | str | None
"""One or several patterns of names, as `skip` of `holdfast.load` takes."""

_DISTRIBUTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_DEVICES = ("cpu", "cuda")


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` that saves and loads checkpoints with Holdfast. All other verbs are Accelerate's."""

    def __init__(self, *arguments: Any, settings: Settings | None = None, **keywords: Any) -> None:
        """Make one as `accelerate.Accelerator`.

        Args:
            *arguments: As Accelerate's.
            settings: How to save and load; None for the defaults.
            **keywords: As Accelerate's.
        Raises:
            InvalidError: The distributed mode or the device is one that Holdfast does not save under Accelerate.
        """
        super().__init__(*arguments, **keywords)
        self._settings = Settings() if settings is None else settings
        self._per_rank: dict[int, PerRank] = {}
        """Registered objects that differ by process, by the identity of the object inside."""
        self._is_new = True
        """Whether it has neither loaded nor saved anything."""
        self._saves: list[tuple[str, SaveHandle]] = []
        """Saves in the background whose end no call has seen yet, with their folders; the same on every process."""
        self._failures: list[BaseException] = []
        """Errors of saves in the background that no call has raised yet."""
        self._is_unasked = False
        """Whether saves have ended whose errors no call has raised, if they have any. Unlike the errors, it is the same
        on every process: one may not know how a save ended that another has seen committed."""
        if self.distributed_type not in _DISTRIBUTED or self.device.type not in _DEVICES:
            raise InvalidError(
                f"holdfast.integrations.accelerate: distributed type {self.distributed_type.value} on "
                f"{self.device.type}; expected {', '.join(each.value for each in _DISTRIBUTED)} on cpu or cuda. Use "
                "accelerate.Accelerator there, whose state Holdfast would not save whole"
            )

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool = True,
        skip: Patterns = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save models, optimizers, schedulers, data loaders, the scaler, random states and registered objects.

        Every process calls. The folder holds a whole checkpoint once it is committed, and none before. Checkpoints over
        `total_limit` go after that. Folders are named as Accelerate names them.

        Args:
            output_dir: The folder, if checkpoints are not named automatically. A checkpoint of Holdfast there is
                replaced: the old one stays whole until the new one is.
            safe_serialization: No effect: nothing is pickled.
            wait: Whether to return once the checkpoint is committed. False: once the state is copied, so that training
                may change it. If such a save fails, the next `save_state`, `load_state`, `wait_for_saves` or
                `end_training` raises its error; with `Settings.failed_saves_max` only `end_training` and
                `wait_for_saves` do, and `save_state` once so many saves in a row have failed.
            skip: Names that are left out, as `skip` of `holdfast.save`.
            **save_model_func_kwargs: None is taken: Accelerate has them for DeepSpeed.
        Returns:
            The folder.
        Raises:
            InvalidError: The state or the call is wrong, on any process: in the middle of gradient accumulation, for
                example. Nothing was written.
            CheckpointError: The save failed, or an earlier one in the background did.
        """
        _require_no_capture()
        self._settle(also_counted=False)
        place = self._agreed_place(output_dir, save_model_func_kwargs)
        if any(folder == place.folder for folder, _ in self._saves):
            # A save in the background to this folder must end before another replaces it.
            self._await_ends()
            self._settle(also_counted=False)
            place = self._agreed_place(output_dir, save_model_func_kwargs)
        by_hooks = saved_by_hooks(self, place.folder)
        state = state_to_save(self, kept_by(self, self._per_rank), by_hooks)
        # The other processes learn from the save itself what is wrong with the state of one.
        left_out = [*_patterns(skip), *by_hooks]
        chosen: dict[str, Any] = {
            "skip": left_out or None,
            "overwrite": place.overwrite,
            "settings": self._settings,
        }
        if wait:
            holdfast.save(place.folder, state, **chosen)
            self._remove_oldest(place.folder)
        else:
            self._saves.append((place.folder, holdfast.async_save(place.folder, state, **chosen)))
        self._is_new = False
        self.project_configuration.iteration += 1
        return Path(place.folder)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        skip: Patterns = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` saved, on any number of processes. Every process calls.

        A folder that Accelerate itself wrote is loaded by Accelerate, with its own guarantees.

        Args:
            input_dir: The folder. None, if checkpoints are named automatically: the newest whole one. A damaged one is
                passed over, with a warning.
            load_kwargs: For folders that Accelerate wrote only.
            skip: Names that stay as they are, as `skip` of `holdfast.load`.
            **load_model_func_kwargs: As `load_kwargs`; `map_location` has no effect otherwise, since objects are filled
                where they are.
        Raises:
            MissingError: There is no whole checkpoint.
            InvalidError: What the checkpoint holds does not fit what was prepared and registered; nothing was changed.
            CorruptError: Stored bytes are not what was saved.
        """
        self.wait_for_saves()
        found = agreed(lambda: folders.folders_to_load(self, input_dir) if self.is_main_process else [])
        for number, folder in enumerate(found):
            try:
                self._load_one(folder, _patterns(skip), load_kwargs, load_model_func_kwargs)
                break
            except CorruptError as error:
                if number == len(found) - 1:
                    raise
                if self.is_main_process:
                    logger.warning("%s: damaged, and passed over for an older checkpoint: %s", folder, error)
        self._is_new = False
        if self.project_configuration.automatic_checkpoint_naming:
            root = folders.root_of(self)
            number = agreed(lambda: folders.next_number(root) if self.is_main_process else 0)
            self.project_configuration.iteration = max(self.save_iteration, number)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Prepare a data loader as Accelerate does, but for one over `holdfast.data.Batches`.

        The batches of such a loader belong to this process already: Accelerate moves these batches to the device, and
        does not split them again. The position is saved and loaded with the others, on any number of processes.

        Args:
            data_loader: The data loader.
            device_placement: As Accelerate.
            *arguments: As Accelerate.
            **keywords: As Accelerate.
        """
        is_divided = isinstance(getattr(data_loader, "batch_sampler", None), holdfast.data.Batches)
        if not is_divided or isinstance(data_loader, DataLoaderStateMixin):  # Which Accelerate has prepared already.
            return super().prepare_data_loader(data_loader, device_placement, *arguments, **keywords)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have `save_state` and `load_state` keep objects with `state_dict` and `load_state_dict`.

        Args:
            *objects: The objects. One that differs by process is passed as `holdfast.PerRank(object)`.
        """
        super().register_for_checkpointing(*[each.value if isinstance(each, PerRank) else each for each in objects])
        self._per_rank |= {id(each.value): each for each in objects if isinstance(each, PerRank)}

    def wait_for_saves(self) -> None:
        """Wait for the saves that `save_state(…, wait=False)` began. Every process calls.

        Raises:
            CheckpointError: One of them failed, and no call has raised its error yet. If several did, the first.
        """
        self._await_ends()
        self._settle(also_counted=True)

    def end_training(self) -> None:
        """Wait for saves in the background, then end as Accelerate does.

        Raises:
            CheckpointError: As `wait_for_saves`, once everything has ended.
        """
        try:
            self.wait_for_saves()
        finally:
            super().end_training()

    def _agreed_place(self, output_dir: object, unknown: dict[str, Any]) -> folders.Place:
        """Require that all processes can save now; return where to. A collective."""
        place = agreed(lambda: self._place_to_save(output_dir, unknown))
        assert place is not None, "process 0 returns one"
        return place

    def _await_ends(self) -> None:
        for _, handle in self._saves:
            _await_end(handle)

    def _place_to_save(self, output_dir: object, unknown: dict[str, Any]) -> folders.Place | None:
        """Require that this process can save now; return where to, on process 0."""
        if unknown:
            raise InvalidError(
                f"save_state({', '.join(unknown)}=…): expected output_dir, safe_serialization, wait and skip. "
                "Accelerate passes others to DeepSpeed, which this Accelerator does not save"
            )
        if self.project_configuration.save_on_each_node:
            raise InvalidError(
                "ProjectConfiguration(save_on_each_node=True): expected a folder that all nodes share. Each process "
                "writes a part of the checkpoint there. Leave it out"
            )
        limit = self.project_configuration.total_limit
        if limit is not None and limit < 1:
            raise InvalidError(f"ProjectConfiguration(total_limit={limit}): expected a whole number from 1, or None")
        if not self.sync_gradients and any(
            each.grad is not None for model in self._models for each in model.parameters()
        ):
            raise InvalidError(
                f"save_state: in the middle of gradient accumulation (every {self.gradient_accumulation_steps} steps), "
                "and a resumed run would lose the gradients so far; expected a call after the optimizer's step. Save "
                "where accelerator.sync_gradients is true"
            )
        if not self.is_main_process:
            return None
        return folders.place_to_save(self, output_dir, self._settings, is_new=self._is_new)

    def _settle(self, *, also_counted: bool) -> None:
        """Forget the saves in the background that have ended, and raise the error of one that failed. A collective.

        A process may see an end before another does: process 0 says which have ended.

        Args:
            also_counted: Also raise what `Settings.failed_saves_max` counts.
        """
        if not self._saves and not self._is_unasked:
            return
        ended = agreed(lambda: [handle.committed.done() for _, handle in self._saves])
        seen = [save for save, has_ended in zip(self._saves, ended, strict=True) if has_ended]
        for _, handle in seen:
            _await_end(handle)
        self._saves = [save for save, has_ended in zip(self._saves, ended, strict=True) if not has_ended]
        self._failures += [handle.failure for _, handle in seen if handle.failure is not None]
        self._is_unasked |= bool(seen)
        committed = [folder for folder, handle in seen if handle.failure is None]
        if committed:
            self._remove_oldest(committed[-1])
        if also_counted or self._settings.failed_saves_max is None:
            failures, self._failures, self._is_unasked = self._failures, [], False
            together(lambda: _raise_first(failures))

    def _remove_oldest(self, newest: str) -> None:
        """Remove checkpoints over `total_limit`, once a newer one is committed; it is never the one that goes."""
        limit = self.project_configuration.total_limit
        if limit is not None and self.project_configuration.automatic_checkpoint_naming and self.is_main_process:
            kept = [newest, *[folder for folder, _ in self._saves]]
            folders.remove_oldest(folders.root_of(self), limit, kept)

    def _load_one(
        self, folder: str, skip: Sequence[str], load_kwargs: dict[str, Any] | None, keywords: dict[str, Any]
    ) -> None:
        """Load from one folder; arguments and errors as `load_state`."""
        checkpoint = agreed(lambda: self._saved_record(folder) if self.is_main_process else None)
        if checkpoint is None:
            if skip:
                raise InvalidError(
                    f"{folder}: Accelerate itself wrote it, and loads all of it; expected no skip={list(skip)!r}. "
                    "Leave it out"
                )
            if self.is_main_process:
                logger.info("%s: written by Accelerate itself, and loaded by it", folder)
            super().load_state(folder, load_kwargs, **keywords)
            return
        unknown = [name for name in keywords if name != "map_location"]
        if unknown:
            raise InvalidError(
                f"load_state({', '.join(unknown)}=…): expected input_dir, load_kwargs, skip and map_location. For a "
                f'model that fits in part: holdfast.load({folder!r}, {{"model": model}}, strict=False)'
            )
        left_to_hooks = loaded_by_hooks(self, folder)
        kept = kept_by(self, self._per_rank)
        state, left = together(lambda: state_to_load(checkpoint, kept, skips(skip), left_to_hooks))
        if self.is_main_process:
            say_other_processes(checkpoint, self.num_processes)
        holdfast.load(folder, state, skip=[*skip, *left] or None, settings=self._settings)
        self.step = checkpoint.step

    def _saved_record(self, folder: str) -> SavedRecord | None:
        checkpoint = folders.record_of(folder, self._settings)
        return None if checkpoint is None else SavedRecord(checkpoint)


def _require_no_capture() -> None:
    """Refuse a save in a graph capture. Not together with the other processes: a collective would be captured too."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise InvalidError(
            "save_state: this process captures a CUDA graph, and a save would become part of it; expected a call "
            "outside. Save after the capture"
        )


def _await_end(handle: SaveHandle) -> None:
    """Wait until a save has ended, however it ended."""
    with suppress(CheckpointError):
        handle.wait("staged")  # A lazy save copies the rest of the state on this thread.
        handle.wait()


def _raise_first(failures: Sequence[BaseException]) -> None:
    if failures:
        raise failures[0]


def _patterns(skip: Patterns) -> list[str]:
    return [] if skip is None else [skip] if isinstance(skip, str) else list(skip)
