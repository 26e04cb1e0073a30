"""Plans kept from save to save: nothing is planned twice, and nothing is written by a plan that no longer holds."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.types.reports import SaveReport
from holdfast.core.plan.plan_cache import PlanCache, save_plan
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import World, plain, saved, sharded

RANKS = 3


def report_of(run: CheckpointManager, step: int, state: Mapping[str, object]) -> SaveReport:
    report = saved(run, step, state)
    assert isinstance(report, SaveReport), report
    return report


def declared(rows: Mapping[int, tuple[int, int]], value: float = 1.0) -> GlobalTensor:
    """A tensor of 8 by 3 of which each rank says which rows it holds."""
    array = np.arange(24, dtype=np.float32).reshape(8, 3) + value
    return GlobalTensor("float32", array, declared={rank: (Box((a, 0), (b, 3)),) for rank, (a, b) in rows.items()})


class CountedRanks(tuple[int, ...]):
    """Ranks that count how often they are compared, element by element, with others."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedRanks.comparisons += 1
        return tuple(self) == tuple(other) if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return super().__hash__()


def test_ranks_are_compared_once_and_not_for_each_tensor() -> None:
    def holders(*changed: int) -> dict[str, tuple[int, ...]]:
        halves = CountedRanks(range(1000)), CountedRanks(range(1000, 2000)), CountedRanks((7,))
        return {str(number): halves[2 if number in changed else number % 2] for number in range(500)}

    plans, plan = PlanCache(), save_plan((), 1 << 20)
    assert plans.of(b"layout", holders(), lambda: plan) == (plan, True)
    CountedRanks.comparisons = 0
    assert plans.of(b"layout", holders(), lambda: plan) == (plan, False)
    assert CountedRanks.comparisons == 2, "once for each group of ranks"
    assert plans.of(b"layout", holders(499), lambda: plan) == (plan, True)
    fewer = holders(499)
    del fewer["3"]
    assert plans.of(b"layout", fewer, lambda: plan) == (plan, True)


def test_an_unchanged_layout_is_planned_once() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        reports = [
            report_of(run, step, {"w": sharded(RANKS), "a": plain(float(step)), "n": plain(0.0, role=Role.BUFFER)})
            for step in range(4)
        ]
        assert len({(each.bytes, each.tensors) for each in reports}) == 1
        target = {"w": sharded(RANKS), "a": plain(0.0), "n": plain(1.0, role=Role.BUFFER)}
        target["w"].array[:] = 0.0
        run.load(target, 2)
        return [each.planned for each in reports], target["a"].array.tolist()

    assert World(RANKS).play(part) == [([True, False, False, False], [2.0] * 100)] * RANKS


def test_layouts_saved_in_turn_are_each_planned_once() -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        whole = {"w": sharded(RANKS), "a": plain(1.0)}
        return [report_of(run, step, whole if step % 2 else {"a": whole["a"]}).planned for step in range(6)]

    assert World(RANKS).play(part) == [[True, True, False, False, False, False]] * RANKS


CHANGES: dict[str, tuple[object, object]] = {
    "another name": ({"a": plain(1.0)}, {"b": plain(1.0)}),
    "another shape": ({"a": plain(1.0)}, {"a": plain(1.0, count=101)}),
    "another dtype": (
        {"a": GlobalTensor("float32", np.ones(4, np.float32))},
        {"a": GlobalTensor("int32", np.ones(4, np.int32))},
    ),
    "another role": ({"a": plain(1.0)}, {"a": plain(1.0, role=Role.BUFFER)}),
    "another placement": (
        {"w": GlobalTensor("float32", np.ones((6, 6), np.float32), MeshLayout((RANKS,), (0, 1, 2), (Placement(0),)))},
        {"w": GlobalTensor("float32", np.ones((6, 6), np.float32), MeshLayout((RANKS,), (0, 1, 2), (Placement(1),)))},
    ),
    "other ranks on the mesh": ({"w": sharded(RANKS, ranks=(0, 1, 2))}, {"w": sharded(RANKS, ranks=(2, 1, 0))}),
    "other rows by hand": (
        {"w": declared({0: (0, 2), 1: (2, 4), 2: (4, 8)})},
        {"w": declared({0: (0, 3), 1: (3, 6), 2: (6, 8)})},
    ),
    "flat instead of a box": (
        {"w": declared({0: (0, 2), 1: (2, 4), 2: (4, 8)})},
        {
            "w": GlobalTensor(
                "float32",
                np.ones((8, 3), np.float32),
                declared={0: (FlatRange(0, 6),), 1: (FlatRange(6, 12),), 2: (FlatRange(12, 24),)},
            )
        },
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layout_is_planned_anew_and_saved_right(change: str) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        planned = []
        for step, state in enumerate(CHANGES[change]):
            assert isinstance(state, dict)
            planned.append(report_of(run, step, state).planned)
            require_loaded(run, step, state)
        return planned

    assert World(RANKS).play(part) == [[True, True]] * RANKS


def require_loaded(run: CheckpointManager, step: int, state: Mapping[str, GlobalTensor]) -> None:
    target = {
        name: GlobalTensor(each.dtype, np.zeros_like(each.array), each.layout, each.role, each.declared)
        for name, each in state.items()
    }
    run.load(target, step)
    for name, each in state.items():
        for region in each.regions_on(run._job.comm.rank):
            found, expected = (
                array.reshape(-1)[region.start : region.stop]
                if isinstance(region, FlatRange)
                else array[region.relative_to((0,) * array.ndim)]
                for array in (target[name].array, each.array)
            )
            assert np.array_equal(found, expected), name


def test_what_changes_on_another_rank_is_noticed_here() -> None:
    """Rank 0 states the same both times; who else holds its tensor decides what it must write."""

    def part(rank: int, run: CheckpointManager) -> object:
        both = {"a": plain(1.0), "b": plain(2.0)}
        planned = [report_of(run, 1, both).planned]
        mine = both if rank == 0 else {"c": plain(3.0)}
        planned.append(report_of(run, 2, mine).planned)
        planned.append(report_of(run, 3, mine).planned)
        return planned

    world = World(2)
    assert world.play(part) == [[True, True, False]] * 2
    assert set(world.pieces(2)) == set(world.pieces(3)) == {"a", "b", "c"}


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_layouts_is_saved_as_it_is(seed: int) -> None:
    def states() -> list[dict[str, GlobalTensor]]:
        chance = random.Random(seed)
        found: list[dict[str, GlobalTensor]] = []
        for _ in range(12):
            cuts = sorted(chance.choices(range(9), k=2))
            rows = {0: (0, cuts[0]), 1: (cuts[0], cuts[1]), 2: (cuts[1], 8)}
            state = {"w": declared({rank: each for rank, each in rows.items() if each[0] < each[1]}, chance.random())}
            for name in chance.sample("abcd", 2):
                state[name] = plain(chance.random(), count=chance.choice((10, 2000)))
            state["s"] = sharded(RANKS, ranks=tuple(chance.sample(range(RANKS), RANKS)))
            found.append(state)
        return found

    def part(rank: int, run: CheckpointManager) -> object:
        planned = []
        for step, state in enumerate(states()):
            own = {name: each for name, each in state.items() if each.is_on(rank)}
            planned.append(report_of(run, step, own).planned)
            require_loaded(run, step, own)
        return planned

    assert all(any(each) for each in World(RANKS).play(part))  # type: ignore[attr-defined]
