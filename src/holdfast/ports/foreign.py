"""The format: another system's checkpoint, read in place or written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from holdfast.ports.store import Readable
from holdfast.types.export import ExportContent, ExportFile, ExportOptions
from holdfast.types.listing import ForeignListing


class Format(Protocol):
    """A layout on storage that Holdfast lists without converting it."""

    @property
    def name(self) -> str:
        """What it is called on the command line, e.g. `dcp`."""
        ...

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether this is a checkpoint of the format, from names and sizes of files and a few of their bytes.

        Args:
            files: The folder that was named, or the folder of the file that was named.
            name: Key of the file that was named; empty for a folder.
        """
        ...

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return what the checkpoint holds; reads its metadata and no tensor.

        Nothing that is read is executed, and nothing is allocated for a count, length or shape before it has been held
        against the real size of the file that states it. Arguments as `recognises`.

        Raises:
            CorruptError: A file is damaged, cut short, or states what cannot be; the message names it and the byte.
            InvalidError: It holds what Holdfast does not read; the message names what, and what to do.
            MissingError: A file that it speaks of is not there.
        """
        ...


class Writer(Protocol):
    """Another system's layout on storage that Holdfast writes: where every byte of every file comes from."""

    @property
    def name(self) -> str:
        """What it is called on the command line, e.g. `dcp`."""
        ...

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return the files to be written; the same for the same arguments, in every process.

        Raises:
            InvalidError: The format cannot hold a tensor, name or value; the message names it, and what to do.
        """
        ...


class Foreign(Protocol):
    """What lies at a path and Holdfast did not write, if anything."""

    @property
    def files(self) -> Readable:
        """The files of it."""
        ...

    @property
    def name(self) -> str:
        """Key of the file, where the path is that of one and so of no checkpoint of Holdfast's; else empty."""
        ...

    def listing(self) -> ForeignListing | None:
        """Return what it holds; None if no format knows it.

        Raises:
            CheckpointError: A format knows it, and it cannot be read.
        """
        ...

    def stamps(self, keys: Collection[str]) -> Mapping[str, str]:
        """Return what files looked like when each was first read, by key: another text for one that was written again,
        as far as can be told without reading it.

        Args:
            keys: Where tensors lie; what was read beside them, in the same folders, is told too.
        """
        ...

    def require_unchanged(self, keys: Collection[str]) -> None:
        """Refuse files that were written again since they were first read.

        Args:
            keys: Where tensors lie; what was read beside them, in the same folders, counts too.
        Raises:
            ConflictError: One was; the message names it.
            MissingError: One is no longer there.
        """
        ...
