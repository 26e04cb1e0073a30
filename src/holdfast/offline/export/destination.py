"""The destination: where another system's files are made, out of sight until they are whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol


class OutputFile(Protocol):
    """One file being made, by several threads and processes."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write a run of it; page-aligned memory at a page-aligned offset is written without a copy."""
        ...

    def sync(self) -> None:
        """Make durable what was written so far.

        Raises:
            UnavailableError: It could not be; what was written since the last call must be written again.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Journal(Protocol):
    """A file that is only added to."""

    def append(self, data: bytes) -> None:
        """Add bytes; durable on return. After a call that failed, every further one does."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Destination(Protocol):
    """A path at which nothing stands yet, and the unfinished work that is to appear there.

    The work outlives the process: notes and journals beside it tell a later one what was done. Every call may be made
    from any thread, and but for `claimed`, `begin`, `clear` and `publish` by several processes at once. Implementations
    translate what they meet into the five errors.
    """

    @property
    def url(self) -> str:
        """The path, for messages."""
        ...

    @property
    def work_url(self) -> str:
        """Where the unfinished work lies, for messages."""
        ...

    @property
    def exists(self) -> bool:
        """Whether something stands at the path."""
        ...

    @property
    def is_moved(self) -> bool:
        """Whether there is work of which the files are gone, so that nothing of it is of use any more."""
        ...

    def claimed(self) -> AbstractContextManager[None]:
        """Keep other processes from the same work for the length of a block.

        Raises:
            ConflictError: Another process is at it.
            InvalidError: The folder around the path does not exist.
        """
        ...

    def is_begun(self, sizes: dict[str, int]) -> bool:
        """Return whether every file is there, by name, as long as it was made."""
        ...

    def begin(self, sizes: dict[str, int]) -> None:
        """Make every file, by name, and reserve room for it, where no work is; if that fails nothing is left of it.

        Raises:
            UnavailableError: There is not enough room.
        """
        ...

    def open(self, name: str) -> OutputFile:
        """Return a file that was begun."""
        ...

    def note(self, data: bytes) -> None:
        """Keep a few bytes beside the work; durable on return. Noted anew, they are others."""
        ...

    def noted(self) -> bytes | None:
        """Return what was noted; None if nothing was."""
        ...

    def published(self) -> bytes | None:
        """Return what was noted of work that was published, by a process that died just then; None where what stands
        at the path is anything else.
        """
        ...

    def journals(self) -> Mapping[str, bytes]:
        """Return what was written to journals, by name."""
        ...

    def journal(self, name: str) -> Journal:
        """Return a journal, new or to be added to."""
        ...

    def clear(self) -> None:
        """Remove unfinished work, notes and journals."""
        ...

    def publish(self) -> None:
        """Have the files appear at the path, all at once and durable; then remove notes and journals.

        Where `is_moved`, removes those.

        Raises:
            ConflictError: Something stands there by now; it was not touched, and the work is kept.
        """
        ...
