"""Folders of checkpoints: their names as Accelerate gives them, which of them are whole, and which go."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import accelerate

from holdfast.api import Checkpoint, open_checkpoint
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.integrations.accelerate.tested import HOST
from holdfast.settings import Settings

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""The file whose presence makes a folder a whole checkpoint of Holdfast (docs/format.md)."""

_ATTEMPT = re.compile(r"[0-9a-f]{16}")
"""Names of folders that a save writes before it commits (docs/format.md)."""

_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
"""Files that Accelerate's own `save_state` writes after models and optimizers, in every mode."""

_NUMBERED = re.compile(r"checkpoint_(\d+)")

Writer = Literal["holdfast", "accelerate"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a save goes."""

    folder: str
    """The folder that becomes the checkpoint."""

    overwrite: bool
    """Whether something of Holdfast is there that the save replaces or clears away."""


def writer_of(folder: str) -> Writer | None:
    """Return whose checkpoint a folder is; None if it holds none, or what a killed save has left."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if MANIFEST in names:
        return "holdfast"
    return "accelerate" if any(map(_RANDOM_STATES.fullmatch, names)) else None


def root_of(accelerator: accelerate.Accelerator) -> str:
    """Return the folder of the checkpoints that are named automatically.

    Raises:
        InvalidError: There is no `project_dir`.
    """
    if accelerator.project_dir is None:
        raise InvalidError(
            "automatic_checkpoint_naming without project_dir; expected a folder for the checkpoints. Pass "
            "ProjectConfiguration(project_dir=…)"
        )
    return os.path.join(_absolute(accelerator.project_dir), "checkpoints")


def numbered_folders(root: str) -> list[tuple[int, str]]:
    """Return number and path of each folder named `checkpoint_N`, ascending."""
    with suppress(FileNotFoundError):
        matches = map(_NUMBERED.fullmatch, os.listdir(root))
        return sorted((int(match[1]), os.path.join(root, match[0])) for match in matches if match is not None)
    return []


def place_to_save(
    accelerator: accelerate.Accelerator, output_dir: object, settings: Settings, *, is_new: bool
) -> Place:
    """Return where the next checkpoint goes, and make its folder. On process 0 only.

    Args:
        accelerator: The accelerator.
        output_dir: As `save_state`.
        settings: How to read what is there.
        is_new: Whether the training has neither loaded nor saved anything.
    Raises:
        InvalidError: No folder is given, a checkpoint is there that must stay, or the project is that of another
            training.
        ConflictError: Another integration, or a job without one, saves there.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        root, number = root_of(accelerator), accelerator.save_iteration
        folder = os.path.join(root, f"checkpoint_{number}")
        _require_own_root(root, settings)
        if writer_of(folder) is not None:
            raise InvalidError(
                f"{folder}: is a checkpoint already; expected none under iteration {number}. Call load_state() before "
                "the first save, or set accelerator.project_configuration.iteration, or choose another project_dir"
            )
        if is_new and number < (free := next_number(root)):
            raise InvalidError(
                f"{root}: holds checkpoint_{free - 1} of an earlier training, and this one has loaded nothing; "
                f"expected none after iteration {number}: load_state() would resume the old training, and total_limit "
                "would remove the new checkpoints. Call load_state() before the first save to go on. To begin anew, "
                f"choose another project_dir, or set accelerator.project_configuration.iteration = {free}"
            )
    elif isinstance(output_dir, str | os.PathLike):
        folder = _absolute(output_dir)
        _require_replaceable(folder, settings)
    else:
        raise InvalidError(
            f"save_state(output_dir={output_dir!r}): expected a folder, or "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)"
        )
    os.makedirs(folder, exist_ok=True)
    names = os.listdir(folder)
    # Hooks write beside the checkpoint, which no save may take for its own.
    only_ours = bool(names) and all(map(_is_of_holdfast, names)) and not accelerator._save_model_state_pre_hook
    return Place(folder, overwrite=MANIFEST in names or only_ours)


def _is_of_holdfast(name: str) -> bool:
    return _ATTEMPT.fullmatch(name) is not None or name in ("overwriting", "reports")


def _require_own_root(root: str, settings: Settings) -> None:
    """Require that the newest checkpoint of a root is of this integration, or of Accelerate itself."""
    for _, folder in reversed(numbered_folders(root)):
        if writer_of(folder) == "holdfast":
            with suppress(CorruptError):
                HOST.require_own_root(open_checkpoint(folder, settings=settings))
                return


def _require_replaceable(folder: str, settings: Settings) -> None:
    """Require that a folder may become a checkpoint, or become one anew."""
    writer = writer_of(folder)
    if writer == "accelerate":
        raise InvalidError(
            f"{folder}: holds a checkpoint that Accelerate itself wrote; expected none, or one of Holdfast. Save to "
            "another folder, or remove it first if it is not needed"
        )
    if writer == "holdfast":
        with suppress(CorruptError):  # A damaged one is replaced, as asked.
            HOST.require_own_root(open_checkpoint(folder, settings=settings))


def folders_to_load(accelerator: accelerate.Accelerator, input_dir: object) -> list[str]:
    """Return the folders to load from, the first that works counts. On process 0 only.

    Raises:
        InvalidError: No folder is given.
        MissingError: There is no checkpoint.
    """
    if input_dir is not None:
        if not isinstance(input_dir, str | os.PathLike):
            raise InvalidError(f"load_state(input_dir={input_dir!r}): expected a folder, or None for the newest")
        folder = _absolute(input_dir)
        if writer_of(folder) is None:
            raise MissingError(
                f"{folder}: no whole checkpoint; expected one of save_state. A save that was killed leaves such a "
                "folder: choose another one, or pass none for the newest"
            )
        return [folder]
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise InvalidError(
            "load_state(): no folder; expected one, or "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)"
        )
    root = root_of(accelerator)
    found = [(folder, writer_of(folder)) for _, folder in reversed(numbered_folders(root))]
    for folder, writer in found:
        if writer is None:
            logger.warning("%s: no whole checkpoint, and passed over: a save was killed there", folder)
    whole = [folder for folder, writer in found if writer is not None]
    if not whole:
        raise MissingError(f"{root}: no whole checkpoint yet; expected one of save_state. Begin without load_state()")
    return whole


def record_of(folder: str, settings: Settings) -> Checkpoint | None:
    """Return the checkpoint in a folder; None if Accelerate itself wrote it.

    Raises:
        InvalidError: Another integration wrote it, or none did.
        CorruptError: Its manifest is damaged.
    """
    if writer_of(folder) == "accelerate":
        return None
    checkpoint = open_checkpoint(folder, settings=settings)
    HOST.require_own(checkpoint)
    return checkpoint


def next_number(root: str) -> int:
    """Return the number after all checkpoints of a root; a folder that a killed save has left may be used again."""
    return max((number + 1 for number, folder in numbered_folders(root) if writer_of(folder) is not None), default=0)


def remove_oldest(root: str, limit: int, kept: Collection[str]) -> None:
    """Remove the oldest checkpoints of a root until `limit` are left, and what killed saves have left before them.

    On process 0 only, after a commit. What cannot be removed is a warning.

    Args:
        root: The folder of the checkpoints.
        limit: How many stay.
        kept: Folders that stay in any case: the newest save, and those under way.
    """
    try:
        found = [(number, folder, writer_of(folder)) for number, folder in numbered_folders(root)]
        whole = [folder for _, folder, writer in found if writer is not None]
        newest = max((number for number, _, writer in found if writer is not None), default=-1)
        left = [folder for number, folder, writer in found if writer is None and number < newest]
        going = [*whole[:-limit], *filter(_holds_attempt, left)]
        for folder in going:
            if folder not in kept:
                _remove(folder)
    except OSError as error:
        logger.warning("%s: total_limit=%s: could not remove what is over it: %s", root, limit, error)


def _holds_attempt(folder: str) -> bool:
    return any(map(_ATTEMPT.fullmatch, os.listdir(folder)))


def _remove(folder: str) -> None:
    """Remove a checkpoint. First the file that makes it whole: a crash leaves no half of one that looks whole."""
    for path in _commit_files(folder):
        with suppress(FileNotFoundError):
            os.unlink(path)
    shutil.rmtree(folder)


def _commit_files(folder: str) -> Iterator[str]:
    yield os.path.join(folder, MANIFEST)
    yield from (os.path.join(folder, name) for name in os.listdir(folder) if _RANDOM_STATES.fullmatch(name))


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return the whole path of a folder.

    Raises:
        InvalidError: It is a URL, of which a folder of this machine would be made.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidError(
            f"{text}: expected a folder, not a URL: Accelerate's hooks write files there. For a URL pass what "
            "prepare() returned to holdfast.save or a CheckpointManager"
        )
    return os.path.abspath(os.path.expanduser(text))
