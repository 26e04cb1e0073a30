"""The destination of an export: files of another system, which readers see only once all of them are complete."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Upload
from holdfast.base.types.export import Claim, DoneWindow, ExportFile


class ExportPlace(Protocol):
    """A path or URL that does not exist yet, and the unfinished work that will appear there.

    The work outlives the process. Any thread may make any call. Several processes may upload and record at once. An
    implementation raises only the five errors of `holdfast.errors`.
    """

    @property
    def url(self) -> str:
        """The path or URL, for messages."""
        ...

    def whole_file_bytes(self, files: Sequence[ExportFile], memory_bytes: int) -> int | None:
        """Return the bytes of the longest file if files are sent whole; None if a window may be any part of a file.

        Args:
            files: The files of the export.
            memory_bytes: Memory of a worker.
        Raises:
            InvalidError: A file is sent whole, and the memory or the store does not hold the file.
        """
        ...

    def claimed(self, fingerprint: str, files: Sequence[ExportFile], clock: Clock) -> AbstractContextManager[Claim]:
        """Claim the place for the length of a block: continue the work of this export, or begin it.

        Raises:
            ConflictError: The place exists, or belongs to another export; nothing was touched.
            InvalidError: The folder around a path does not exist.
            UnavailableError: There is not enough room; nothing is left.
        """
        ...

    def upload(self, file: ExportFile) -> Upload:
        """Begin to write one window of a file, at its offset in the file.

        `Upload.complete` makes the window durable. The file appears then if the window is the whole file and the place
        sends files whole, otherwise at `publish`.
        """
        ...

    def record(self, journal: str, windows: Sequence[DoneWindow]) -> None:
        """Record durable windows, so that a later call leaves these windows out; durable on return.

        Args:
            journal: As `claimed` returned it.
            windows: The windows.
        """
        ...

    def recorded(self, journal: str) -> Sequence[DoneWindow]:
        """Return the recorded windows of all workers and earlier calls."""
        ...

    def publish(self) -> None:
        """End the claim of complete files: a path appears, all files at once and durable. Remove every record.

        Raises:
            ConflictError: The path exists by now; it was not touched, and the work is kept.
        """
        ...
