"""Reads both ends of many small archives in one file with few large reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from holdfast.backends.foreign.read import read_ranges
from holdfast.base.ports.forwarding import ForwardingReadable
from holdfast.base.ports.ranges import hand_out
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, Readable
from holdfast.settings import KIB, MIB

END_BYTES = 2 * KIB
"""Bytes held of each end of an item. Header and pickle of a tensor take about 300 bytes, the directory 700."""

_GAP_BYTES_MAX = 16 * KIB
"""Largest gap that is read and dropped to save a second read."""

_RANGE_BYTES_MAX = 4 * MIB
"""Longest range that is read to hold several items."""

_HELD_BYTES_MAX = 16 * MIB
"""Bytes held at once, of one file."""


class TailPrefetch(ForwardingReadable):
    """A folder that holds some byte ranges of one file in memory, and reads all others on request."""

    def __init__(self, files: Readable) -> None:
        """Start without held ranges.

        Args:
            files: The folder.
        """
        super().__init__(files)
        self._key = ""
        self._starts: list[int] = []
        self._held: list[bytes] = []
        self._sizes: dict[str, int] = {}

    def hold(self, key: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Read byte ranges of a file and hold them in place of the earlier ones.

        Args:
            key: The file.
            ranges: Half-open, inside the file, ascending, without overlap.
        """
        self._key, self._starts = key, [start for start, _ in ranges]
        self._held = read_ranges(self._inner, key, ranges)

    def held(self, start: int, stop: int) -> bytes:
        """Return held bytes `[start, stop)` of the current file; empty unless all of them are held."""
        number = bisect_right(self._starts, start) - 1
        if number < 0:
            return b""
        first = start - self._starts[number]
        data = self._held[number][first : first + stop - start]
        return data if len(data) == stop - start else b""

    def size(self, key: str) -> int:
        """Return the bytes of a file, from storage only once."""
        if key not in self._sizes:
            self._sizes[key] = self._inner.size(key)
        return self._sizes[key]

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of a file: from memory if all of them are held, else from storage."""
        held = [self.held(start, stop) for start, stop in ranges] if key == self._key else [b""]
        if all(held):
            hand_out(held, buffers, on_range)
        else:
            self._inner.read_into(key, ranges, buffers, on_range)


def batches(bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
    """Yield runs of items of one file, and the byte ranges that contain both ends of each item.

    Args:
        bounds: Half-open byte range of each item, ascending. Items overlap only if they start at one byte.
    """
    first_item, held_bytes = 0, 0
    ranges: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(bounds):
        ends = [(start, stop)]
        if stop - start > 2 * END_BYTES + _GAP_BYTES_MAX:
            ends = [(start, start + END_BYTES), (stop - END_BYTES, stop)]
        if number > first_item and held_bytes > _HELD_BYTES_MAX:
            yield slice(first_item, number), ranges
            first_item, held_bytes, ranges = number, 0, []
        for first, last in ends:
            # Small items are close together: reading the gap between them is cheaper than another read.
            near = ranges and first - ranges[-1][1] <= _GAP_BYTES_MAX and last - ranges[-1][0] <= _RANGE_BYTES_MAX
            if near:
                held_bytes += max(last - ranges[-1][1], 0)
                ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
            else:
                held_bytes += last - first
                ranges.append((first, last))
    if ranges:
        yield slice(first_item, len(bounds)), ranges
