"""The packs of a checkpoint, by their names in the index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.ports.readable import Readable


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a pack is stored."""

    files: Readable
    """The store, or the files of another system."""

    key: str
    """Its key in `files`."""

    others: tuple[Stored, ...] = ()
    """Where the same pack is stored too, in the order in which they are tried."""

    @property
    def url(self) -> str:
        """Place of the pack, for messages."""
        return f"{self.files.url}/{self.key}"


Packs = Callable[[str], Stored]
"""Returns where a pack of a checkpoint is stored, by its name in the index."""


def packs_under(files: Readable, prefix: str) -> Packs:
    """Return the packs of one folder, stored under their names."""
    return lambda name: Stored(files, prefix + name)
