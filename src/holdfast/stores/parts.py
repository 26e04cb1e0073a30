"""Checks of upload parts and read ranges that every store shares."""

from __future__ import annotations

import numpy as np

from holdfast.errors import CorruptError, InvalidError
from holdfast.ports.store import Buffers, ByteRanges
from holdfast.settings import PAGE_BYTES


class PartLedger:
    """Records which parts of an upload have been written."""

    def __init__(self, where: str, *, total_bytes: int, part_bytes: int) -> None:
        """Begin with no part written.

        Raises:
            InvalidError: A size is negative, or the part size is not a multiple of a page.
        """
        if part_bytes <= 0 or part_bytes % PAGE_BYTES or total_bytes < 0:
            raise InvalidError(
                f"upload of {where}: part_bytes={part_bytes}, total_bytes={total_bytes}; expected parts of a positive "
                f"multiple of {PAGE_BYTES} bytes and a total of 0 or more"
            )
        self.where = where
        """Store and key, for messages."""
        self.total_bytes = total_bytes
        """Bytes of the whole object."""
        self._part_bytes = part_bytes
        self.written: set[int] = set()
        """Offsets of the parts that were written. Any thread may add one."""

    def check(self, offset: int, length_bytes: int) -> None:
        """Require exactly one part.

        Raises:
            InvalidError: The offset is not the start of a part, or the length is not that part's.
        """
        expected = min(self._part_bytes, self.total_bytes - offset)
        if offset < 0 or offset % self._part_bytes or length_bytes != expected or not length_bytes:
            raise InvalidError(
                f"upload of {self.where}: a part of {length_bytes} bytes at {offset}; expected parts of "
                f"{self._part_bytes} bytes at its multiples, the last one ending at {self.total_bytes}"
            )

    def require_whole(self) -> None:
        """Require every part.

        Raises:
            InvalidError: A part was not written.
        """
        written = len(self.written)
        expected = -(-self.total_bytes // self._part_bytes)
        if written != expected:
            raise InvalidError(
                f"upload of {self.where}: {written} of {expected} parts written; write every part, then complete"
            )


def is_page_aligned(data: memoryview) -> bool:
    """Return whether memory that is not empty begins at a page boundary, as direct I/O needs it."""
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


def check_ranges(where: str, total_bytes: int, ranges: ByteRanges, buffers: Buffers) -> None:
    """Require ranges inside an object and buffers that hold them, before a byte is read.

    Args:
        where: Store and key.
        total_bytes: The object's real size.
        ranges: Half-open byte ranges.
        buffers: One buffer per range, at least two pages longer.
    Raises:
        CorruptError: The object ends before a range does.
        InvalidError: A range is negative, or a buffer is missing, too small or read-only.
    """
    if len(ranges) != len(buffers):
        raise InvalidError(
            f"read of {where}: {len(ranges)} ranges, {len(buffers)} buffers; expected one buffer per range"
        )
    for (start, stop), buffer in zip(ranges, buffers, strict=True):
        _require_inside(where, total_bytes, start, stop)
        if buffer.readonly or buffer.nbytes < stop - start + 2 * PAGE_BYTES:
            raise InvalidError(
                f"read of {where}: a buffer of {buffer.nbytes} bytes{' (read-only)' if buffer.readonly else ''} for "
                f"[{start}, {stop}); expected a writable one at least two pages longer than the range"
            )


def check_buffers(where: str, total_bytes: int, start: int, buffers: Buffers) -> None:
    """Require writable buffers that the object fills from `start` on, before a byte is read.

    Raises:
        CorruptError: The object ends before the last buffer does.
        InvalidError: The start is negative or a buffer read-only.
    """
    if any(buffer.readonly for buffer in buffers):
        raise InvalidError(f"read of {where}: a buffer is read-only; expected writable memory")
    _require_inside(where, total_bytes, start, start + sum(buffer.nbytes for buffer in buffers))


def _require_inside(where: str, total_bytes: int, start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise InvalidError(f"read of {where}: range [{start}, {stop}); expected 0 <= start <= stop")
    if stop > total_bytes:
        raise CorruptError(
            f"{where}: bytes [{start}, {stop}) requested, but the object has {total_bytes} bytes. It was truncated, or "
            "the index is wrong: verify the checkpoint, or read another copy"
        )
