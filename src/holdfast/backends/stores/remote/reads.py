"""Decides which requests read byte ranges of one object: neighbours together, large ranges in pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from holdfast.base.ports.ranges import check_ranges
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange
from holdfast.base.ports.temporary import TemporaryError
from holdfast.settings import MIB

_GAP_BYTES_MAX = 256 * 1024
"""Bytes between two ranges that are read along rather than asked for in two requests."""

_REQUEST_BYTES_MAX = 8 * MIB
"""Most bytes of one request: several of them share the work for one large range."""

_BATCH_BYTES_MAX = 64 * MIB
"""Most bytes of the requests that are in flight together: the client has memory of its own for all of them."""


@dataclass(frozen=True, slots=True)
class RangePart:
    """A part of one range that one request brings."""

    number: int
    """Number of the range."""

    start: int
    """First byte, in the object."""

    stop: int
    """End, in the object."""

    is_last: bool
    """Whether the range ends with it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are made side by side."""

    pieces: tuple[RangePart, ...]
    """What they bring, in the order of the ranges; empty ranges included."""

    requests: tuple[tuple[int, int], ...]
    """Half-open byte ranges, sorted, apart."""


def batches_of(ranges: ByteRanges) -> Iterator[Batch]:
    """Yield the batches that read some ranges, in order."""
    pieces: list[RangePart] = []
    held_bytes = 0
    for piece in _pieces_of(ranges):
        # With what is read along: a gap, or at most as much where pieces are far apart, which bounds the requests too.
        gap_bytes = _gap_bytes_max(pieces[-1], piece) if pieces else 0
        piece_bytes = piece.stop - piece.start
        if pieces and held_bytes + gap_bytes + piece_bytes > _BATCH_BYTES_MAX:
            yield Batch(tuple(pieces), _requests_of(pieces))
            pieces, held_bytes, gap_bytes = [], 0, 0
        pieces.append(piece)
        held_bytes += gap_bytes + piece_bytes
    if pieces:
        yield Batch(tuple(pieces), _requests_of(pieces))


def _gap_bytes_max(before: RangePart, piece: RangePart) -> int:
    gap = piece.start - before.stop
    return min(gap, _GAP_BYTES_MAX) if gap >= 0 else _GAP_BYTES_MAX


def _pieces_of(ranges: ByteRanges) -> Iterator[RangePart]:
    for number, (start, stop) in enumerate(ranges):
        while stop - start > _REQUEST_BYTES_MAX:
            yield RangePart(number, start, start + _REQUEST_BYTES_MAX, is_last=False)
            start += _REQUEST_BYTES_MAX
        yield RangePart(number, start, stop, is_last=True)


def _requests_of(pieces: Sequence[RangePart]) -> tuple[tuple[int, int], ...]:
    requests: list[tuple[int, int]] = []
    for start, stop in sorted((piece.start, piece.stop) for piece in pieces if piece.stop > piece.start):
        if requests:
            first, last = requests[-1]
            if start <= last + _GAP_BYTES_MAX and max(stop, last) - first <= _REQUEST_BYTES_MAX:
                requests[-1] = (first, max(stop, last))
                continue
            if stop <= last:
                continue
        requests.append((start, stop))
    return tuple(requests)


def cut(batch: Batch, held: Sequence[memoryview], piece: RangePart) -> memoryview:
    """Return the bytes of one piece out of those that the requests brought."""
    if piece.start == piece.stop:
        return memoryview(b"")
    # Requests are sorted: the last one that does not begin behind the piece holds all of it.
    number = bisect_right(batch.requests, piece.start, key=itemgetter(0)) - 1
    start, stop = batch.requests[number]
    assert piece.stop <= stop, "every piece is in a request"
    return held[number][piece.start - start : piece.stop - start]


def read_by_batches(
    where: str,
    ranges: ByteRanges,
    buffers: Buffers,
    on_range: OnRange | None,
    *,
    size: Callable[[], int],
    batch_bytes: Callable[[Batch], Sequence[memoryview] | None],
) -> None:
    """Read byte ranges of one object through memory of a client.

    Args:
        where: Store and key, for messages.
        ranges, buffers, on_range: As for `Readable.read_into`.
        size: Asks for the bytes of the object.
        batch_bytes: Makes the requests of a batch; None if the object ends before one does.
    Raises:
        CorruptError: The object ends before a range does.
        TemporaryError: Less came than was asked for.
    """
    # Buffers and bounds are checked here, the end of the object by what comes: no request just for its size.
    end = max((stop for _, stop in ranges), default=0)
    check_ranges(where, end, ranges, buffers)
    # No request meets the end of the object where an empty range ends after all others, or if none has bytes.
    if end > max((stop for start, stop in ranges if start < stop), default=-1):
        check_ranges(where, size(), ranges, buffers)
    for batch in batches_of(ranges):
        held = batch_bytes(batch)
        if held is None:
            check_ranges(where, size(), ranges, buffers)
            raise TemporaryError(f"could not read {where}: the server sent less than was asked for")
        for piece in batch.pieces:
            start, stop = ranges[piece.number]
            view, data = buffers[piece.number], cut(batch, held, piece)
            if on_range is not None and piece.stop - piece.start == stop - start:
                on_range(piece.number, data)
                continue
            if data.nbytes:  # An empty buffer cannot be cast.
                view = view.cast("B")
                view[piece.start - start : piece.stop - start] = data
            if piece.is_last and on_range is not None:
                on_range(piece.number, view)
