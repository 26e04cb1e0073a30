"""What samples of replicas find: all of a difference at the first save, and in the end whatever later saves look at."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, plain, saved

COUNT = 4096
"""Elements of a tensor: 16 blocks of samples, of 256 that there are."""

SAMPLING = tuned(PATIENT, sample_blocks=16, sample_block_bytes=64, sample_whole_bytes=4 * COUNT)
SAVES = 35
"""Saves until every element was sampled: the gaps of so many multiples of the golden ratio are below 1/16."""

LAYOUTS = {
    "plain": (None, None),
    "siblings": tuple(MeshLayout((1,), (rank,), (Placement(0),)) for rank in (0, 1)),
}


def one_off(rank: int, at: int, layout: MeshLayout | None = None, *, count: int = COUNT) -> GlobalTensor:
    """A tensor of which rank 1 has another value in one element."""
    array = np.zeros(count, dtype=np.float32)
    array[at] += rank
    return GlobalTensor("float32", array, layout, Role.OPTIMIZER)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("at", (0, 17, COUNT // 2 + 5, COUNT - 1))
def test_one_element_that_differs_is_found_at_the_first_save(kind: str, at: int) -> None:
    world = World(2, SAMPLING)
    outcomes = world.play(lambda rank, run: saved(run, 1, {"w": one_off(rank, at, LAYOUTS[kind][rank])}))
    assert [type(each) for each in outcomes] == [InvalidError] * 2, outcomes
    assert all("w (" in str(each) for each in outcomes)
    assert world.files() == []


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("stride", (1, 1597), ids=lambda stride: f"every {stride} steps")
def test_elements_that_come_to_differ_are_found_whichever_steps_are_saved(kind: str, stride: int) -> None:
    """Of 256 blocks a save looks at 16, at the same ones on each rank: no save looks where another has looked."""
    places = {"first": 0, "middle": 2049, "last": COUNT - 1}

    def part(rank: int, run: CheckpointManager) -> list[object]:
        layout = LAYOUTS[kind][rank]
        equal = saved(run, 1, {name: one_off(0, at, layout) for name, at in places.items()})
        differing = {name: one_off(rank, at, layout) for name, at in places.items()}
        return [equal, *(saved(run, 1 + stride * number, differing) for number in range(1, SAVES + 1))]

    for first, *later in World(2, SAMPLING).play(part):  # type: ignore[misc]
        assert isinstance(first, SaveReport), first
        refusals = [str(each) for each in later if isinstance(each, InvalidError)]
        assert {name for name in places if any(f"{name} (" in text for text in refusals)} == places.keys()
        assert 3 <= len(refusals) < SAVES / 2, "each is seen by a few saves"


def test_a_tensor_above_the_size_is_sampled_at_the_first_save_too() -> None:
    """It takes time to read: one that differs everywhere is found, and one block that differs perhaps later."""
    world = World(2, SAMPLING)
    found = set()
    for at in range(0, 2 * COUNT, 257):
        outcomes = world.play(lambda rank, run: saved(run, at + 1, {"w": one_off(rank, at, count=2 * COUNT)}))  # noqa: B023
        assert len({type(each) for each in outcomes}) == 1, outcomes
        found |= {type(each) for each in outcomes}
    assert found == {InvalidError, SaveReport}


def test_ranks_sample_the_same_places_after_saves_that_one_of_them_missed() -> None:
    """Replicas that are equal, and no two of their elements: to look at other places would be a difference."""
    array = np.arange(COUNT, dtype=np.float32)

    def part(rank: int, run: CheckpointManager) -> list[object]:
        outcomes = []
        for step in range(1, 9):
            broken = {"x": object()} if rank == 1 and step % 3 == 1 else {}
            outcomes.append(saved(run, step, {"w": GlobalTensor("float32", array, None), "v": plain(1.0)} | broken))
        return outcomes

    world = World(2, SAMPLING)
    for outcomes in world.play(part):
        assert isinstance(outcomes, list)
        assert [isinstance(each, SaveReport) for each in outcomes] == [step % 3 != 1 for step in range(1, 9)], outcomes
    assert world.committed() == [2, 3, 5, 6, 8]
