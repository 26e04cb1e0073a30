"""Sums of declared parts: equal to that of the whole for an exact cover, and for nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import Role, Shard, TensorSpec
from holdfast.core.plan.declared_parts import (
    DeclaredParts,
    DeclaredTensor,
    SumCache,
    declared_tensors,
    decode_sum,
    encode_sum,
    problem_of,
    sums_of_parts,
    sums_of_wholes,
    total,
)

SHAPE = (3, 4, 5)
TENSOR = DeclaredTensor("float32", SHAPE)


def shard(pieces: Sequence[Region], holders: tuple[int, ...], fqn: str = "w") -> Shard:
    return Shard(TensorSpec(fqn, "float32", SHAPE), None, holders, Role.PARAMETER, tuple(pieces))


def is_covered(shards: Mapping[int, Sequence[Shard]]) -> bool:
    held = total(each for rank, of_rank in shards.items() for each in sums_of_parts(of_rank, rank).values())
    wholes = {fqn: tensor for of_rank in shards.values() for fqn, tensor in declared_tensors(of_rank).items()}
    return held == total(sums_of_wholes(wholes).values())


@given(st.lists(st.integers(0, 60), max_size=6), st.data())
def test_runs_cover_a_tensor_only_if_each_begins_where_the_last_ends(cuts: list[int], data: st.DataObject) -> None:
    bounds = [0, *sorted(cuts), 60]
    runs = [FlatRange(start, stop) for start, stop in pairwise(bounds)]
    shards = {rank: [shard([run], (rank,))] for rank, run in enumerate(runs)}
    assert is_covered(shards)
    rank = data.draw(st.sampled_from([rank for rank, run in enumerate(runs) if run.numel]))
    run = runs[rank]
    moved = data.draw(st.integers(0, 60 - run.numel))
    shards[rank] = [shard([FlatRange(moved, moved + run.numel)], (rank,))]
    assert is_covered(shards) == (moved == run.start)


def test_errors_of_two_tensors_do_not_cancel_each_other() -> None:
    half, other_half = FlatRange(0, 30), FlatRange(30, 60)
    shards = {
        0: [shard([half], (0,), "a"), shard([half], (0,), "b")],
        1: [shard([half], (1,), "a"), shard([other_half], (1,), "b")],
        2: [shard([], (2,), "a"), shard([other_half], (2,), "b")],
    }
    assert not is_covered(shards)
    shards[1], shards[2] = [shard([other_half], (1,), "a"), shard([], (1,), "b")], [shard([other_half], (2,), "b")]
    assert is_covered(shards)


WHOLE = [Box.whole(SHAPE)]


@pytest.mark.parametrize(
    ("holders", "is_right"),
    [
        ({0: (0, 2, 3), 2: (0, 2, 3), 3: (0, 2, 3)}, True),
        ({0: (0, 2, 3), 2: (0, 2, 3)}, False),
        ({0: (0, 1), 2: (2, 3)}, False),
        ({0: (0, 1), 3: (2, 3)}, False),
        ({0: (0, 1), 1: (1, 2), 2: (0, 2)}, False),
        ({0: (0,), 1: (0, 1)}, False),
        ({0: (0, 1), 1: (0, 1), 2: (2,)}, False),
    ],
)
def test_each_rank_of_a_group_of_replicas_declares_the_group(
    holders: Mapping[int, tuple[int, ...]], *, is_right: bool
) -> None:
    assert is_covered({rank: [shard(WHOLE, ranks)] for rank, ranks in holders.items()}) == is_right


def test_replicas_with_other_parts_are_found_and_named() -> None:
    first, second = FlatRange(0, 30), FlatRange(30, 60)
    assert not is_covered({0: [shard([first], (0, 1))], 1: [shard([second], (0, 1))]})
    held = {0: DeclaredParts((Box((0, 0, 0), (1, 4, 5)),), (0, 1)), 1: DeclaredParts((), (0, 1))}
    assert problem_of(TENSOR, held) == "rank 0 states replicas [0, 1]; rank 1 states other parts"


class Counted(dict[int, DeclaredParts]):
    """What ranks declare, with a count of the comparisons."""

    count = 0

    def get(self, key: int, default: object = None) -> DeclaredParts | None:  # type: ignore[override]
        self.count += 1
        return super().get(key)


def test_each_rank_of_a_group_of_replicas_is_compared_once() -> None:
    """Rank 0 looks for the problem while all ranks wait: to compare each pair of 2,000 ranks took 89 s."""
    parts = DeclaredParts((Box((0, 0, 0), (2, 4, 5)),), tuple(range(100)))
    held = Counted(dict.fromkeys(range(100), parts))
    assert problem_of(TENSOR, held) == "no rank holds 20 of 60 elements"
    assert held.count == 100
    held[7] = DeclaredParts(parts.boxes, (7,))
    assert problem_of(TENSOR, held).endswith("; rank 7 states other parts")
    held = Counted({5: parts, 6: parts})
    assert problem_of(TENSOR, held).endswith("; rank 0 states other parts"), "rank 0 states nothing"


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_a_scalar_and_a_tensor_without_elements(shape: tuple[int, ...]) -> None:
    tensor = TensorSpec("s", "float32", shape)
    shards = [Shard(tensor, None, (0,), Role.PARAMETER, (Box.whole(shape),))]
    assert is_covered({0: shards})
    again = {0: shards, 1: [Shard(tensor, None, (1,), Role.PARAMETER, (Box.whole(shape),))]}
    assert is_covered(again) == (shape != ())
    held = {rank: DeclaredParts((Box.whole(()),), (rank,)) for rank in (0, 1)}
    assert problem_of(DeclaredTensor("float32", ()), held) == "[]–[]: ranks 0 and 1 hold it"


def test_a_sum_is_eight_bytes_and_kept_for_a_layout() -> None:
    cache = SumCache()
    sums = cache.of(b"layout", [shard(WHOLE, (0,))], 0)
    assert sums.held == sums.whole == decode_sum(encode_sum(sums.held))
    assert len(encode_sum(sums.held)) == 8
    assert cache.of(b"layout", [], 0) is sums
    for number in range(4):
        cache.of(bytes([number]), [], 0)
    assert cache.of(b"layout", [], 0) is not sums
