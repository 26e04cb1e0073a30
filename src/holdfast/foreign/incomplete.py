"""What is left of a checkpoint of which the files are missing that the rest is found by: told, never read."""

from __future__ import annotations

from holdfast.errors import CheckpointError, MissingError
from holdfast.foreign.dcp.reader import METADATA
from holdfast.foreign.deepspeed.folder import FIRST_FILES, LATEST, holds_states, tag_in
from holdfast.foreign.wording import shown
from holdfast.ports.store import Readable
from holdfast.types.listing import ForeignListing

_ITEMS = ".distcp"
_TAGS_MAX = 5
"""Named in a message."""


class RemainsFormat:
    """Knows checkpoints of DeepSpeed and DCP that lack what tells of them; asked after every other format."""

    @property
    def name(self) -> str:
        """What it is called."""
        return "remains"

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether a folder was named that holds some files of a checkpoint."""
        return not name and _missing(files) is not None

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Raise an error that says what is there, and what is not."""
        raise MissingError(f"{files.url}: {_missing(files)}")


def _missing(files: Readable) -> str | None:
    """Return what is there and what is missing; None where nothing is known."""
    items: list[str] = []
    states: dict[str, list[str]] = {}
    tag = tag_in(files, LATEST)
    try:
        for entry in files.list():
            folder, _, name = entry.key.rpartition("/")
            if holds_states(name):
                states.setdefault(folder, []).append(name)
            elif not folder and (name.endswith(_ITEMS) or name == METADATA):
                items.append(name)
    except CheckpointError:
        return None
    if items and METADATA not in items:
        return (
            f"{len(items)} files of torch.distributed.checkpoint ({min(items)}) and no {METADATA}, which a save writes "
            "last; expected both. The save did not finish, or not all of it was copied: choose another checkpoint"
        )
    for folder in ("", tag or ""):
        if folder in states:
            found = states[folder]
            return (
                f"{folder or 'the folder'} holds {min(found)}{f' and {len(found) - 1} more' if found[1:] else ''}, and "
                f"neither {FIRST_FILES[0]} nor {FIRST_FILES[1]}; expected the model states of rank 0. Copy the rest"
            )
    tags = sorted(states)
    there = f"found {', '.join(tags[:_TAGS_MAX])}{', …' if len(tags) > _TAGS_MAX else ''}" if tags else "found no tag"
    if tag:
        return f"{LATEST} names {shown(tag)}, and no files of it are there; {there}. Copy it, or name a tag's folder"
    return f"no {LATEST} that names a tag of DeepSpeed's; {there}. Name one of these folders" if tags else None
