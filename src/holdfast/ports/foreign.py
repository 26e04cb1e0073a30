"""The format: another system's checkpoint, read in place or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.ports.store import Readable
from holdfast.types.export import ExportContent, ExportFile, ExportOptions
from holdfast.types.listing import ForeignListing


class Format(Protocol):
    """A layout on storage that Holdfast lists without converting it."""

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
