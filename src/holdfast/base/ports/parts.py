"""Checks of the parts of an upload, and an upload that collects its parts in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from holdfast.base.ports.readable import Release
from holdfast.errors import InvalidError
from holdfast.settings import PAGE_BYTES


class PartLedger:
    """Records which parts of an upload have been written; any thread may call."""

    def __init__(self, where: str, *, bytes_max: int, part_bytes: int) -> None:
        """Begin with no part written.

        Raises:
            InvalidError: A size is negative, or the part size is not a multiple of a page.
        """
        if part_bytes <= 0 or part_bytes % PAGE_BYTES or bytes_max < 0:
            raise InvalidError(
                f"upload of {where}: part_bytes={part_bytes}, bytes_max={bytes_max}; expected parts of a positive "
                f"multiple of {PAGE_BYTES} bytes and a size of 0 or more"
            )
        self.where = where
        """Store and key, for messages."""
        self.bytes_max = bytes_max
        """Bytes that the object will not exceed."""
        self.part_bytes = part_bytes
        """Size of every part but the last."""
        self._written: dict[int, int] = {}
        """Bytes of the parts that were written, by offset."""

    def check(self, offset: int, length_bytes: int) -> None:
        """Require offset and length of one part.

        Raises:
            InvalidError: The offset is not the start of a part, or the part is empty or too long.
        """
        longest = min(self.part_bytes, self.bytes_max - offset)
        if offset < 0 or offset % self.part_bytes or not 0 < length_bytes <= longest:
            raise InvalidError(
                f"upload of {self.where}: a part of {length_bytes} bytes at {offset}; expected parts of "
                f"{self.part_bytes} bytes at its multiples, the last one ending at {self.bytes_max} or before"
            )

    def note_written(self, offset: int, length_bytes: int) -> None:
        """Take note of a part that was written."""
        self._written[offset] = length_bytes

    def require_whole(self, total_bytes: int | None) -> int:
        """Require exactly the parts of an object of this size; return the size.

        Args:
            total_bytes: The size; None: all that was announced.
        Raises:
            InvalidError: A part was not written or has another length, or there are parts beyond the end.
        """
        total = self.bytes_max if total_bytes is None else total_bytes
        if not 0 <= total <= self.bytes_max:
            raise InvalidError(
                f"upload of {self.where}: total_bytes={total}; expected at most the {self.bytes_max} bytes announced"
            )
        expected = {at: min(self.part_bytes, total - at) for at in range(0, total, self.part_bytes)}
        if self._written != expected:
            whole = len(self._written.items() & expected.items())
            raise InvalidError(
                f"upload of {self.where}: {whole} of {len(expected)} parts of an object of {total} bytes written, and "
                f"{len(self._written) - whole} others; write every part in its full length, then complete"
            )
        return total


class RoomUpload:
    """The parts of an upload that collects its object in one piece of memory: a base of `Upload`."""

    def __init__(self, ledger: PartLedger) -> None:
        """Begin with no part written."""
        self._ledger = ledger

    def _open_memory(self) -> memoryview:
        """Return the memory of the object, `ledger.bytes_max` bytes or more.

        Raises:
            InvalidError: The upload has ended.
        """
        raise NotImplementedError

    def room(self, offset: int, length_bytes: int) -> memoryview:
        """Return the memory of one part."""
        self._ledger.check(offset, length_bytes)
        return self._open_memory()[offset : offset + length_bytes]

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Copy one part, unless it is in its room already."""
        try:
            room = self.room(offset, data.nbytes)
            if address_of(data) != address_of(room):
                # numpy releases Python's lock. An assignment to a slice would hold it, and training would wait.
                np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(data, np.uint8))
            self._ledger.note_written(offset, data.nbytes)
        finally:
            if release is not None:
                release()


class CollectedUpload(RoomUpload):
    """Collects an object in memory of its own, and stores the object at `complete`."""

    def __init__(self, ledger: PartLedger, keep: Callable[[memoryview], None]) -> None:
        """Begin with no part written.

        Args:
            ledger: Key and sizes of the object.
            keep: Stores the object, as `Store.put_if_absent`. The upload never changes the memory again.
        """
        super().__init__(ledger)
        self._keep = keep
        self._lock = threading.Lock()
        # Pages that no part touches take no memory.
        self._memory: memoryview | None = np.empty(ledger.bytes_max, dtype=np.uint8).data

    def complete(self, total_bytes: int | None = None) -> None:
        """Store the object; after an error, the same call may be made again."""
        with self._lock:
            memory = self._open_memory()
            self._keep(memory[: self._ledger.require_whole(total_bytes)].toreadonly())
            self._memory = None

    def abort(self) -> None:
        """Drop the object, unless it is stored."""
        with self._lock:
            self._memory = None

    def _open_memory(self) -> memoryview:
        memory = self._memory
        if memory is None:
            raise InvalidError(f"{self._ledger.where}: the upload was completed or aborted before")
        return memory


def address_of(data: memoryview) -> int:
    """Return the address of memory that is not empty."""
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def is_page_aligned(data: memoryview) -> bool:
    """Return whether memory that is not empty begins at a page boundary, as direct I/O needs it."""
    return address_of(data) % PAGE_BYTES == 0
