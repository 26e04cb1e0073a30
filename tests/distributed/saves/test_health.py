"""A rank whose copy differs is named, and new non-finite values are marked: real gloo processes."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.distributed.saves.health_cases"
WEIGHT, MOMENT = "model.1.weight", "optimizer.state.0.weight.exp_avg"


def case(function: str, name: str, root: Path, **arguments: object) -> Case:
    return Case(f"{CASES}:{function}", {"root": str(root / name), **arguments}, name)


def said(results: Results, name: str) -> list[list[dict[str, Any]]]:
    """What each rank was told, save by save."""
    found = results.values(name)
    assert all(isinstance(each, list) for each in found)
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("health-3")
    cases = [
        case("replicated", "odd", root, damaged_rank=1),
        case("replicated", "unwatched", root, damaged_rank=1, settings="default"),
        case("hybrid", "all_alike", root, replicas=3, damaged_rank=-1),
        case("nonfinite", "nonfinite", root),
    ]
    return run_world(3, cases, root / "world")


def test_of_three_copies_the_odd_one_is_named(three: Results) -> None:
    for rank, (before, after) in enumerate(said(three, "odd")):
        assert (before["unhealthy"], before["divergent"], before["warned"]) == ([], {}, [])
        assert after["divergent"] == {WEIGHT: [1], MOMENT: [1]}
        assert (after["undecided"], after["hosts"], after["nonfinite"]) == ([], [1], {})
        where = f"the copy of rank 1 ({platform.node()}) differs from most others"
        assert after["unhealthy"] == [f"{WEIGHT}: {where}", f"{MOMENT}: {where}"]
        assert len(after["warned"]) == (1 if rank == 0 else 0)


def test_a_bit_that_no_sample_covers_goes_unseen_where_nobody_compares(three: Results) -> None:
    for before, after in said(three, "unwatched"):
        assert (before["divergent"], after["divergent"], after["unhealthy"]) == (None, None, [])


def test_copies_that_are_alike_are_healthy(three: Results) -> None:
    for saves in said(three, "all_alike"):
        assert [each["divergent"] for each in saves] == [{}, {}]


def test_new_nonfinite_values_are_counted_over_ranks_and_marked_until_they_are_gone(three: Results) -> None:
    for rank, (first, broken, later) in enumerate(said(three, "nonfinite")):
        assert (first["nonfinite"], first["unhealthy"]) == ({"model.mask": 7}, [])
        assert broken["nonfinite"] == {WEIGHT: 1 + 2 + 3, "model.mask": 7}
        assert broken["unhealthy"] == [f"{WEIGHT}: 6 non-finite elements, 0 before"]
        assert len(broken["warned"]) == (1 if rank == 0 else 0)
        assert later == {"again": broken["unhealthy"], "mended": []}


def test_two_copies_that_differ_are_both_named(tmp_path: Path) -> None:
    two = run_world(2, [case("replicated", "even", tmp_path, damaged_rank=1)], tmp_path / "world")
    for _, after in said(two, "even"):
        assert after["divergent"] == {WEIGHT: [0, 1], MOMENT: [0, 1]}
        assert sorted(after["undecided"]) == sorted([WEIGHT, MOMENT])
        assert all("the right one is unknown" in each for each in after["unhealthy"])


def test_of_hybrid_shards_only_those_who_hold_the_same_are_compared(tmp_path: Path) -> None:
    cases = [case("hybrid", "hybrid", tmp_path, replicas=2, damaged_rank=3)]
    four = run_world(4, cases, tmp_path / "world")
    for before, after in said(four, "hybrid"):
        assert before["divergent"] == {}
        # Of two replicas, ranks 1 and 3 hold the same half.
        assert after["divergent"] == {WEIGHT: [1, 3]} and after["undecided"] == [WEIGHT]
