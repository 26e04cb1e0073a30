"""The `CheckpointIO` for one device and DDP: one process saves for all, and every process loads."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

import holdfast
from holdfast import Settings
from holdfast.errors import InvalidError
from holdfast.integrations.lightning.contents import (
    lightning_dict,
    require_readable,
    values_state,
    warn_of_accumulation,
)
from holdfast.integrations.lightning.folders import destination, local_path, restore
from holdfast.integrations.lightning.saves import Path, SavesOfProcess, is_needed_at_once

_Loaded = TypeVar("_Loaded")

_DEFAULT = Settings()


class HoldfastCheckpointIO(CheckpointIO):
    """Saves, loads and removes the checkpoints of a Trainer or of Fabric; a plugin of either.

    Under DDP Lightning calls it on rank 0 alone to save, and on every rank to load.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        skip: Iterable[str] | str = (),
        settings: Settings = _DEFAULT,
    ) -> None:
        """Save nothing yet.

        Args:
            background: Whether a save returns once the state is copied, and training goes on while it is written. A
                failure is logged and counted, and raised at the end of the training; after
                `Settings.failed_saves_max` in a row the next save raises.
            skip: Patterns of names that are left out, as for `holdfast.save`: `hyper_parameters.loss`.
            settings: How to save and load.
        """
        super().__init__()
        self._background, self._settings = bool(background), settings
        self._skip = (skip,) if isinstance(skip, str) else tuple(skip)
        # Made at the first call: strategies that spawn their processes send this object to them.
        self._made: SavesOfProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned process gets: not the saves of this one."""
        return {**vars(self), "_made": None}

    @property
    def _saves(self) -> SavesOfProcess:
        if self._made is None:
            self._made = SavesOfProcess(type(self).__name__, False, self._settings, self._skip)
        return self._made

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint; replace the one at the path, if there is one.

        Args:
            checkpoint: What Lightning has put together.
            path: A path, or a URL of a store (docs/stores.md).
            storage_options: None. How a store is reached stands in `settings`.
        Raises:
            InvalidError: The checkpoint holds what cannot be saved, something else is at the path, or Lightning's
                `AsyncCheckpointIO` calls.
            ConflictError: Another integration saves at the path.
            UnavailableError: Storage failed.
        """
        require_no_options(storage_options)
        _require_caller()
        state = values_state(checkpoint, self._skip)
        warn_of_accumulation(checkpoint, path)
        self._saves.await_ends(path)
        target = destination(path, in_background=self._background)
        if self._background and not target.is_linked and not is_needed_at_once(path):
            self._saves.begin(target, state, publishes=True)
            return
        self._saves.save(target, state)
        target.publish()

    def load_checkpoint(
        self, path: Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint, as Lightning saved it. One that Lightning wrote itself is read, too.

        Args:
            path: A path, or a URL of a store.
            map_location: A device for the tensors; None for the CPU.
            weights_only: For a file of Lightning's. No code in a checkpoint of Holdfast is ever run.
        Raises:
            MissingError: There is no checkpoint.
            InvalidError: Another integration wrote it, or `map_location` is no device.
            CorruptError: Stored bytes are not what was saved.
        """
        self._saves.await_ends()
        text = local_path(path)
        restore(text)
        if os.path.isfile(text):
            location = {} if map_location is None else {"map_location": map_location}
            own: dict[str, Any] = TorchCheckpointIO().load_checkpoint(text, **location, weights_only=weights_only)
            return own
        device = _device_of(map_location)
        checkpoint = holdfast.open_checkpoint(text, settings=self._settings)
        require_readable(checkpoint)
        loaded = lightning_dict(holdfast.read(text, settings=self._settings))
        return loaded if device.type == "cpu" else _moved(loaded, device)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint; do nothing if there is none.

        After a save in the background, it is removed once that is committed, and stays if that fails.
        """
        self._saves.remove(path)

    def wait(self) -> None:
        """Wait for the saves in the background. Trainer does it at its end; with Fabric, call it.

        Raises:
            CheckpointError: One of them failed, and no call has raised its error yet.
        """
        self._saves.wait()

    def teardown(self) -> None:
        """Wait, as `wait`; Trainer calls it. While it ends after another error, that one is raised, with a note."""
        self._saves.end()


def load_from_checkpoint(
    kind: type[_Loaded], path: Path, *, settings: Settings = _DEFAULT, **arguments: Any
) -> _Loaded:
    """Return what `kind.load_from_checkpoint(path)` would; that opens one file, so it cannot open a folder of Holdfast.

    It writes the checkpoint to a temporary file as Lightning's own. For a large one, export it once instead:
    `holdfast.export(path, "model.ckpt", to="torch", model_only=False)`.

    Args:
        kind: A `LightningModule` or `LightningDataModule`.
        path: The checkpoint.
        settings: How to read.
        arguments: As for `load_from_checkpoint`: `map_location`, `strict`, `hparams_file`, hyperparameters.
    Raises:
        MissingError: There is no checkpoint.
        InvalidError: Another integration wrote it, or it needs no help: call the method itself.
    """
    if not hasattr(kind, "load_from_checkpoint"):
        raise InvalidError(f"{kind!r} has no load_from_checkpoint; expected a LightningModule or LightningDataModule")
    text = local_path(path)
    checkpoint = holdfast.open_checkpoint(text, settings=settings)
    if checkpoint.origin is not None:
        raise InvalidError(f"{text}: is not of Holdfast; call {kind.__name__}.load_from_checkpoint({text!r})")
    require_readable(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "checkpoint.ckpt")
        holdfast.export(text, file, to="torch", model_only=False, settings=settings)
        # The file was written a moment ago, of values alone.
        loaded: _Loaded = kind.load_from_checkpoint(file, **{"weights_only": False, **arguments})  # type: ignore[attr-defined]
        return loaded


def require_no_options(storage_options: object) -> None:
    """Refuse options of another way to reach storage.

    Raises:
        InvalidError: There are some.
    """
    if storage_options is not None:
        raise InvalidError(
            f"storage_options={storage_options!r}; expected None: how a store is reached stands in "
            "settings=Settings(object_store=ObjectSettings(…))"
        )


def _require_caller() -> None:
    """Refuse to save on a thread of Lightning's `AsyncCheckpointIO`.

    It removes a checkpoint before the one that follows is saved, and does not remove one that waits to be saved.

    Raises:
        InvalidError: It is the caller.
    """
    frame = inspect.currentframe()
    caller = None if frame is None or frame.f_back is None else frame.f_back.f_back
    if caller is not None and caller.f_globals.get("__name__") == "lightning.pytorch.plugins.io.async_plugin":
        raise InvalidError(
            "AsyncCheckpointIO around HoldfastCheckpointIO: it removes checkpoints before those that follow are saved; "
            "expected HoldfastCheckpointIO(background=True) alone, which saves in the background and removes afterwards"
        )


def _device_of(map_location: object) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    raise InvalidError(
        f"map_location={map_location!r}; expected a device, or None for the CPU: a checkpoint of Holdfast names no "
        "devices to map from"
    )


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device. Dicts and lists are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, device)
    elif isinstance(value, list):
        value[:] = [_moved(item, device) for item in value]
    elif isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value
