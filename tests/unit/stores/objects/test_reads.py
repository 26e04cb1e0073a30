"""Which requests read some ranges: every byte once, neighbours together, a bounded number of bytes at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.stores.objects import reads
from holdfast.stores.objects.reads import batches_of, cut

_MIB = 1 << 20
_POINTS = st.integers(0, 40 * _MIB) | st.integers(0, 100).map(lambda n: n * 4096)


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
                (request,) = [each for each in batch.requests if each[0] <= piece.start and piece.stop <= each[1]][:1]
                assert request
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
