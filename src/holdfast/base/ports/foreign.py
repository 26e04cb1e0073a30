"""Formats of other systems' checkpoints: those that Holdfast reads in place, and those that it writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from holdfast.base.ports.readable import Readable
from holdfast.base.types.export import ExportContent, ExportFile, ExportOptions
from holdfast.base.types.listing import ForeignListing


class WatchedFiles(Readable, Protocol):
    """The files of another system, under their own names, which must not change while they are read.

    A key is a path of any characters, without empty parts, `.` or `..`.
    """

    def stamps(self, keys: Collection[str]) -> Mapping[str, str]:
        """Return by key a text of each file that changes if the file is rewritten, as it was first seen here.

        Files that were opened in the same folders are included: they describe the content of the others. Files
        elsewhere are not, such as the `latest` file of a run that is still training.
        """
        ...

    def require_unchanged(self, keys: Collection[str]) -> None:
        """Require that the files of `stamps` are the same as when they were first seen here.

        Raises:
            ConflictError: A file was rewritten; the message names it.
            MissingError: A file was removed.
        """
        ...

    def for_operation(self, name: str, rank: int, world_size: int) -> WatchedFiles:
        """Return the files as one load sees them: the calls through it share one deadline, if they are retried."""
        ...


class Format(Protocol):
    """A storage format whose checkpoints Holdfast lists without converting them."""

    def recognises(self, files: Readable, name: str) -> bool:
        """Return whether this is a checkpoint of the format, by names and sizes of files and a few of their bytes.

        Args:
            files: The folder that was named, or the folder of the file that was named.
            name: Key of the file that was named; empty for a folder.
        """
        ...

    def listing(self, files: Readable, name: str) -> ForeignListing:
        """Return the content of the checkpoint; reads its metadata, but no tensor.

        Nothing in the files is executed. A count, length or shape is compared with the real size of its file before
        memory is allocated for it. Arguments as for `recognises`.

        Raises:
            CorruptError: A file is damaged, truncated or contradictory; the message names the file and the byte.
            InvalidError: Holdfast does not support part of the content; the message names it, and what to do.
            MissingError: The checkpoint names a file that does not exist.
        """
        ...


class Writer(Protocol):
    """A storage format that Holdfast writes: it tells where every byte of every file comes from."""

    name: str
    """Its name on the command line, e.g. `dcp`."""

    def files(self, content: ExportContent, options: ExportOptions) -> Sequence[ExportFile]:
        """Return the files to write; equal arguments give equal files, in every process.

        Raises:
            InvalidError: The format cannot hold a tensor, name or value; the message names it, and what to do.
        """
        ...
