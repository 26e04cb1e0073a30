"""What an export asks of its destination: files of another system, invisible until all of them are complete."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol


class OutputFile(Protocol):
    """One file that several threads and processes write."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write a range of the file; page-aligned memory at a page-aligned offset is written without a copy."""
        ...

    def sync(self) -> None:
        """Make durable what was written so far.

        Raises:
            UnavailableError: It failed; what was written since the last call must be written again.
        """
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Journal(Protocol):
    """An append-only file."""

    def append(self, data: bytes) -> None:
        """Append bytes, durable on return. After one call fails, every later one does."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Destination(Protocol):
    """A path that does not exist yet, and the unfinished work that will appear there.

    The work outlives the process: notes and journals beside it record what was done. Any thread may make any call.
    Several processes may call at once, except `claimed`, `begin`, `clear` and `publish`. An implementation raises only
    the five errors of `holdfast.errors`. `offline/` may not import stores: `backends/stores/destination.py` implements
    this protocol.
    """

    @property
    def url(self) -> str:
        """The path, for messages."""
        ...

    @property
    def work_url(self) -> str:
        """Where the unfinished work is stored, for messages."""
        ...

    @property
    def exists(self) -> bool:
        """Whether the path exists."""
        ...

    @property
    def is_moved(self) -> bool:
        """Whether there is work whose files are gone, so that its notes and journals are useless."""
        ...

    def claimed(self) -> AbstractContextManager[None]:
        """Lock the work against other processes for the length of a block.

        Raises:
            ConflictError: Another process holds the lock.
            InvalidError: The folder around the path does not exist.
        """
        ...

    def is_begun(self, sizes: dict[str, int]) -> bool:
        """Return whether every file, by name, exists and has its full length."""
        ...

    def begin(self, sizes: dict[str, int]) -> None:
        """Create every file, by name, and reserve its space, where there is no work yet; if that fails, leave nothing.

        Raises:
            UnavailableError: There is not enough room.
        """
        ...

    def open(self, name: str) -> OutputFile:
        """Open a file that `begin` created."""
        ...

    def note(self, data: bytes) -> None:
        """Store a few bytes beside the work, replacing earlier ones; durable on return."""
        ...

    def noted(self) -> bytes | None:
        """Return the note; None if there is none."""
        ...

    def published(self) -> bytes | None:
        """Return the note of published work whose process died before it removed the note; None if the path holds
        anything else.
        """
        ...

    def journals(self) -> Mapping[str, bytes]:
        """Return the content of all journals, by name."""
        ...

    def journal(self, name: str) -> Journal:
        """Open a journal to append to; create it if needed."""
        ...

    def clear(self) -> None:
        """Remove unfinished work, notes and journals."""
        ...

    def publish(self) -> None:
        """Make the files appear at the path, all at once and durable; then remove notes and journals.

        If `is_moved`, only remove notes and journals.

        Raises:
            ConflictError: The path exists by now; it was not touched, and the work is kept.
        """
        ...
