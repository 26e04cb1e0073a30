"""Declared parts that overlap or leave gaps, over threads: refused by name before the first byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import World, plain, saved

WORLD = 4


def rows(first: int, last: int) -> Region:
    return Box((first, 0), (last, 4))


def declared(parts: Mapping[int, Sequence[Region]], shape: tuple[int, ...] = (8, 4)) -> GlobalTensor:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return GlobalTensor("float32", array, declared={rank: tuple(regions) for rank, regions in parts.items()})


EVEN = {rank: [rows(2 * rank, 2 * rank + 2)] for rank in range(WORLD)}

WRONG: dict[str, tuple[Mapping[int, Sequence[Region]], str]] = {
    "an overlap": (EVEN | {1: [rows(1, 4)]}, "[1, 0]–[2, 4]: ranks 0 and 1 hold it"),
    "a gap": (EVEN | {2: [rows(5, 6)]}, "no rank holds 4 of 32 elements"),
    "an overlap as large as a gap": (EVEN | {3: [rows(5, 7)]}, "[5, 0]–[6, 4]: ranks 2 and 3 hold it"),
    "one rank twice": (EVEN | {3: [rows(6, 8), FlatRange(24, 25)]}, "[6, 0]–[7, 1]: rank 3 holds it twice"),
    "boxes and flat ranges": (EVEN | {0: [FlatRange(0, 9)]}, "[2, 0]–[3, 1]: ranks 0 and 1 hold it"),
    "a rank without a part": ({rank: EVEN[rank] for rank in (0, 1, 3)}, "no rank holds 8 of 32 elements"),
}


def refusals(world: World, states: Sequence[Mapping[str, object]]) -> list[str]:
    """Save; return the error that the call raised on each rank."""

    def part(rank: int, run: CheckpointManager) -> str:
        # The refusal is raised by the call: a save that fails at its commit has written its bytes by then.
        with pytest.raises(InvalidError) as raised:
            run.save(1, states[rank])
        return str(raised.value)

    texts = world.play(part)
    assert all(isinstance(text, str) for text in texts), texts
    assert world.files() == []
    return [str(text) for text in texts]


@pytest.mark.parametrize("name", WRONG)
def test_parts_that_do_not_cover_a_tensor_once_are_refused_before_the_first_byte(name: str) -> None:
    parts, problem = WRONG[name]
    states = [{"v": declared(EVEN)} | ({"w": declared(parts)} if rank in parts else {}) for rank in range(WORLD)]
    for text in refusals(World(WORLD), states):
        assert f"w [8, 4] ({problem})" in text
        assert "v [8" not in text
        assert "start=" in text
        assert "a name of its own" in text


def test_the_wrong_tensors_of_many_are_named() -> None:
    """More names than a rank answers for at a time."""
    moved = EVEN | {3: [rows(5, 7)]}
    state = {f"layers.{n:03}": declared(moved if n in (77, 78) else EVEN) for n in range(300)}
    for text in refusals(World(WORLD), [state] * WORLD):
        assert "layers.077 [8, 4] ([5, 0]–[6, 4]: ranks 2 and 3 hold it), layers.078 [8, 4]" in text


def test_two_stages_that_reuse_a_name_are_refused() -> None:
    first, second = declared({0: [rows(0, 4)], 1: [rows(4, 8)]}), declared({2: [rows(0, 4)], 3: [rows(4, 8)]})
    states = [{"layers.0": first if rank < 2 else second} for rank in range(WORLD)]
    for text in refusals(World(WORLD), states):
        assert "layers.0 [8, 4] ([0, 0]–[4, 4]: ranks 0 and 2 hold it)" in text


def test_a_name_of_two_shapes_is_refused() -> None:
    states = [{"w": declared(EVEN, (8, 4) if rank < 2 else (8, 8))} for rank in range(WORLD)]
    for text in refusals(World(WORLD), states):
        assert "w (float32 [8, 4] on rank 0 ≠ float32 [8, 8] on rank 2)" in text
        assert "a name of its own" in text


@pytest.mark.parametrize("other", ["plain", "on a mesh"])
def test_parts_beside_a_whole_tensor_of_the_name_are_refused(other: str) -> None:
    mesh = MeshLayout((2,), (2, 3), (Placement(0),))
    whole = plain(1.0) if other == "plain" else GlobalTensor("float32", np.zeros((8, 4), np.float32), mesh)
    parts = declared({0: [rows(0, 4)], 1: [rows(4, 8)]})
    for text in refusals(World(WORLD), [{"w": parts if rank < 2 else whole} for rank in range(WORLD)]):
        assert "w [8, 4] (declared in parts on ranks [0, 1], whole on others)" in text


def test_parts_that_cover_are_saved_with_replicas_empty_parts_and_classes() -> None:
    replicated = declared({0: [rows(0, 4)], 1: [rows(4, 8)], 2: [rows(0, 4)], 3: [rows(4, 8)]})
    ragged = declared({0: [FlatRange(0, 13)], 1: [FlatRange(13, 32)], 2: [], 3: []})
    mixed = declared({0: [FlatRange(0, 8)], 1: [rows(2, 4), rows(6, 8)], 3: [rows(4, 6)]})
    world = World(WORLD)
    states = [
        {"replicated": replicated, "ragged": ragged} | ({"mixed": mixed} if rank != 2 else {"own": plain(2.0)})
        for rank in range(WORLD)
    ]
    outcomes = world.play(lambda rank, run: [saved(run, step, states[rank]) for step in (1, 2)])
    assert all(isinstance(each, SaveReport) for of_rank in outcomes for each in of_rank), outcomes  # type: ignore[attr-defined]
    assert sum(piece.bytes for piece in world.pieces(2)["mixed"]) == 128
