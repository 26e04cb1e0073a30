"""Which requests read some ranges: every byte once, neighbours together, a bounded number of bytes at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.remote import reads
from holdfast.backends.stores.remote.reads import batches_of, cut

_MIB = 1 << 20
_POINTS = st.integers(0, 40 * _MIB) | st.integers(0, 100).map(lambda n: n * 4096)


class _Bounds:
    """Stands for the bytes of a request; a slice of it is a range of the object."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._bytes = start, stop - start

    def __getitem__(self, part: slice) -> tuple[int, int]:
        assert 0 <= part.start <= part.stop <= self._bytes
        return self._start + part.start, self._start + part.stop


@given(st.lists(st.tuples(_POINTS, _POINTS).map(sorted), max_size=40))
def test_batches_bring_every_range(ranges: list[list[int]]) -> None:
    bounds = [(start, stop) for start, stop in ranges]
    done = dict.fromkeys(range(len(bounds)), 0)
    order = []
    for batch in batches_of(bounds):
        assert batch.requests == tuple(sorted(batch.requests))
        assert all(start < stop for start, stop in batch.requests)
        assert sum(stop - start for start, stop in batch.requests) <= 2 * reads._BATCH_BYTES_MAX
        for piece in batch.pieces:
            start, stop = bounds[piece.number]
            assert piece.start == start + done[piece.number]
            done[piece.number] += piece.stop - piece.start
            assert piece.is_last == (piece.stop == stop)
            if piece.start < piece.stop:
                held = [_Bounds(*each) for each in batch.requests]
                assert cut(batch, held, piece) == (piece.start, piece.stop)  # type: ignore[arg-type, comparison-overlap]
            if piece.is_last:
                order.append(piece.number)
    assert order == list(range(len(bounds)))
    assert all(done[number] == stop - start for number, (start, stop) in enumerate(bounds))


def test_neighbours_share_a_request() -> None:
    (batch,) = batches_of([(0, 10), (100_000, 100_010), (20 * _MIB, 20 * _MIB + 5)])
    assert batch.requests == ((0, 100_010), (20 * _MIB, 20 * _MIB + 5))


def test_a_large_range_comes_in_several_requests() -> None:
    (batch,) = batches_of([(5, 5 + 20 * _MIB)])
    assert len(batch.requests) == 3
    held = [memoryview(bytes(stop - start)) for start, stop in batch.requests]
    assert [cut(batch, held, piece).nbytes for piece in batch.pieces] == [8 * _MIB, 8 * _MIB, 4 * _MIB]


def test_what_is_read_along_counts() -> None:
    # Ends of many small tensors, as DCP's files have them: between two of them is more than they have.
    ranges = [(at * 200 * 1024, at * 200 * 1024 + 1024) for at in range(2000)]
    batches = list(batches_of(ranges))
    assert max(sum(stop - start for start, stop in batch.requests) for batch in batches) <= reads._BATCH_BYTES_MAX
    assert sum(len(batch.requests) for batch in batches) < 60


def test_requests_of_a_batch_are_few_where_ranges_are_far_apart() -> None:
    batches = list(batches_of([(at * _MIB, at * _MIB + 1024) for at in range(2000)]))
    assert max(len(batch.requests) for batch in batches) <= 256
