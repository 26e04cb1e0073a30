"""Detects DeepSpeed and DCP checkpoints whose index files are missing and names what is missing."""

from __future__ import annotations

from holdfast.backends.foreign.dcp.reader import METADATA
from holdfast.backends.foreign.deepspeed.folder import FIRST_FILES, LATEST, holds_states, tag_in
from holdfast.backends.foreign.messages import shown
from holdfast.base.ports.readable import Readable
from holdfast.errors import CheckpointError, MissingError, first_three

_DCP_DATA_SUFFIX = ".distcp"


def require_complete(files: Readable, name: str) -> None:
    """Refuse a folder that no format recognises and that holds files of a checkpoint.

    Args:
        files: The folder, or the folder of the named file.
        name: Key of the named file; empty for a folder. A single file is never refused.
    Raises:
        MissingError: The message names the files that are present and the one that is missing.
    """
    missing = None if name else _missing(files)
    if missing is not None:
        raise MissingError(f"{files.url}: {missing}")


def _missing(files: Readable) -> str | None:
    """Return what is present and what is missing; None if the folder holds no files of a checkpoint."""
    data_files: list[str] = []
    states: dict[str, list[str]] = {}
    tag = tag_in(files, LATEST)
    try:
        for entry in files.list():
            folder, _, name = entry.key.rpartition("/")
            if holds_states(name):
                states.setdefault(folder, []).append(name)
            elif not folder and (name.endswith(_DCP_DATA_SUFFIX) or name == METADATA):
                data_files.append(name)
    except CheckpointError:
        # The caller reports that the path holds no checkpoint; a folder that cannot be listed adds nothing to that.
        return None
    if data_files and METADATA not in data_files:
        return (
            f"{len(data_files)} files of torch.distributed.checkpoint ({min(data_files)}) and no {METADATA}, which a "
            "save writes last; expected both. The save did not finish, or the copy is partial. Choose another "
            "checkpoint"
        )
    for folder in ("", tag or ""):
        if folder in states:
            return (
                f"{folder or 'the folder'} holds {first_three(sorted(states[folder]))}, and neither {FIRST_FILES[0]} "
                f"nor {FIRST_FILES[1]}; expected the model states of rank 0. Copy the missing files"
            )
    tags = sorted(states)
    present = f"found {first_three(tags)}" if tags else "found no tag"
    if tag:
        return f"{LATEST} names {shown(tag)}, which holds no files; {present}. Copy that tag, or name a tag's folder"
    return f"no {LATEST} file names a DeepSpeed tag; {present}. Name one of these folders" if tags else None
