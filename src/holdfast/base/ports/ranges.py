"""Byte ranges of an object: checks before a read, and how buffers are filled."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, Readable
from holdfast.errors import CorruptError, InvalidError


def check_ranges(where: str, total_bytes: int, ranges: ByteRanges, buffers: Buffers) -> None:
    """Require ranges inside an object and buffers that hold them, before a byte is read.

    Args:
        where: Store and key.
        total_bytes: The object's real size.
        ranges: Half-open byte ranges.
        buffers: One buffer of its length per range.
    Raises:
        CorruptError: The object ends before a range does.
        InvalidError: A range is negative, or a buffer is missing, of another length or read-only.
    """
    if len(ranges) != len(buffers):
        raise InvalidError(
            f"read of {where}: {len(ranges)} ranges, {len(buffers)} buffers; expected one buffer per range"
        )
    for (start, stop), buffer in zip(ranges, buffers, strict=True):
        _require_inside(where, total_bytes, start, stop)
        if buffer.readonly or buffer.nbytes != stop - start:
            raise InvalidError(
                f"read of {where}: a buffer of {buffer.nbytes} bytes{' (read-only)' if buffer.readonly else ''} for "
                f"[{start}, {stop}); expected a writable one of {stop - start} bytes"
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


def runs_of(ranges: ByteRanges, bytes_max: int) -> list[tuple[int, int]]:
    """Return numbers, the first and the one after the last, of ranges that one request reads: neighbours in order.

    Args:
        ranges: Half-open byte ranges.
        bytes_max: Most bytes of a request for more than one range.
    """
    runs, first = [], 0
    for number, (start, stop) in enumerate(ranges):
        if number > first and (start != ranges[number - 1][1] or stop - ranges[first][0] > bytes_max):
            runs.append((first, number))
            first = number
    return [*runs, (first, len(ranges))] if ranges else []


def _require_inside(where: str, total_bytes: int, start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise InvalidError(f"read of {where}: range [{start}, {stop}); expected 0 <= start <= stop")
    if stop > total_bytes:
        raise CorruptError(
            f"{where}: bytes [{start}, {stop}) requested, but the object has {total_bytes} bytes. It was truncated, or "
            "the index is wrong: verify the checkpoint, or read another copy"
        )


def view_for_range(buffer: memoryview, start: int, stop: int, alignment: int) -> memoryview:
    """Return the part of a page-aligned buffer that takes bytes `[start, stop)` of an object without a further copy.

    Args:
        buffer: Page-aligned, at least `alignment - 1` bytes longer than the range.
        start, stop: The range.
        alignment: `traits.read_alignment` of the store.
    """
    first = start % alignment
    return buffer[first : first + stop - start]


def read_range(files: Readable, key: str, start: int, stop: int, buffer: memoryview) -> memoryview:
    """Read one range of an object into a buffer as `view_for_range` takes it; return its bytes in the buffer."""
    view = view_for_range(buffer, start, stop, files.traits.read_alignment)
    files.read_into(key, [(start, stop)], [view])
    return view


def hand_out(held: Iterable[bytes | memoryview], buffers: Buffers, on_range: OnRange | None) -> None:
    """Carry out `read_into` with bytes that the store has in memory: nothing is copied if `on_range` takes them.

    Args:
        held: Bytes of each range; taken one by one.
        buffers, on_range: As for `read_into`.
    """
    for number, (data, buffer) in enumerate(zip(held, buffers, strict=True)):
        if on_range is not None:
            on_range(number, memoryview(data))
        elif data:  # An empty buffer cannot be cast.
            buffer.cast("B")[:] = data
