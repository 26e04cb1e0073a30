"""The ends of many small archives in one file, read together."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from holdfast.ports.store import Buffers, ByteRanges, ForwardingReadable, OnRange, Readable
from holdfast.settings import KIB, MIB, PAGE_BYTES

END_BYTES = 2 * KIB
"""What is held of either end of an item: head and pickle of a tensor take about 300 bytes, the directory 700."""

_GAP_BYTES_MAX = 16 * KIB
"""Bytes that are read though nobody asked, rather than reading twice."""

_WINDOW_BYTES_MAX = 4 * MIB
_WINDOWS_BYTES_MAX = 16 * MIB
"""What is held at once."""


class TailPrefetch(ForwardingReadable):
    """Files of which some byte ranges are held in memory, and everything else is read as it is asked for."""

    def __init__(self, files: Readable) -> None:
        """Hold nothing yet.

        Args:
            files: Where everything lies.
        """
        super().__init__(files)
        self._key = ""
        self._starts: list[int] = []
        self._held: list[bytes] = []
        self._sizes: dict[str, int] = {}

    def hold(self, key: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Read byte ranges of a file and hold them in place of what was held.

        Args:
            key: The file.
            ranges: Half-open, each inside the file, ascending, none overlapping another.
        """
        self._key, self._starts, self._held = key, [start for start, _ in ranges], []
        total_bytes = sum(_buffer_bytes(each) for each in ranges)
        if not total_bytes:
            return
        with mmap.mmap(-1, total_bytes) as memory, memoryview(memory) as whole:
            buffers, at = [], 0
            for each in ranges:
                buffers.append(whole[at : at + _buffer_bytes(each)])
                at += _buffer_bytes(each)
            for found in self._inner.get_ranges(key, ranges, buffers):
                self._held.append(bytes(found))
                found.release()
            for buffer in buffers:
                buffer.release()

    def held(self, start: int, stop: int) -> bytes:
        """Return bytes of the file in hand out of what is held; nothing where they are not held whole."""
        number = bisect_right(self._starts, start) - 1
        if number < 0:
            return b""
        first = start - self._starts[number]
        found = self._held[number][first : first + stop - start]
        return found if len(found) == stop - start else b""

    def size(self, key: str) -> int:
        """Return the bytes of a file, asked once."""
        if key not in self._sizes:
            self._sizes[key] = self._inner.size(key)
        return self._sizes[key]

    def get_ranges(
        self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> list[memoryview]:
        """Return byte ranges of a file, out of what is held where it holds them all."""
        held = [self.held(start, stop) for start, stop in ranges] if key == self._key else [b""]
        if not all(held):
            return self._inner.get_ranges(key, ranges, buffers, on_range)
        found = []
        for number, (data, buffer) in enumerate(zip(held, buffers, strict=True)):
            view = buffer[: len(data)]
            view[:] = data
            found.append(view)
            if on_range is not None:
                on_range(number, view)
        return found


def _buffer_bytes(bounds: tuple[int, int]) -> int:
    """Return the bytes of a page-aligned buffer for a range, with two pages to spare."""
    return -(-(bounds[1] - bounds[0]) // PAGE_BYTES) * PAGE_BYTES + 2 * PAGE_BYTES


def batches(bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Yield runs of items of one file, and the byte ranges that hold both ends of each.

    Args:
        bounds: First byte and byte past the last of each item; ascending, none overlapping another unless both start
            at one byte.
    """
    begun, held_bytes = 0, 0
    ranges: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(bounds):
        ends = [(start, stop)]
        if stop - start > 2 * END_BYTES + _GAP_BYTES_MAX:
            ends = [(start, start + END_BYTES), (stop - END_BYTES, stop)]
        if number > begun and held_bytes > _WINDOWS_BYTES_MAX:
            yield slice(begun, number), ranges
            begun, held_bytes, ranges = number, 0, []
        for first, last in ends:
            near = ranges and first - ranges[-1][1] <= _GAP_BYTES_MAX and last - ranges[-1][0] <= _WINDOW_BYTES_MAX
            if near:
                held_bytes += max(last - ranges[-1][1], 0)
                ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
            else:
                held_bytes += last - first
                ranges.append((first, last))
    if ranges:
        yield slice(begun, len(bounds)), ranges
