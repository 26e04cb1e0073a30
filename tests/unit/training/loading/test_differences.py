"""What differs on any rank, every rank lists, in one error; nothing is changed."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import Role
from holdfast.errors import InvalidError
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import World, plain


def other(dtype: str, count: int) -> GlobalTensor:
    return GlobalTensor(dtype, np.zeros(count, dtype=dtype), None, Role.PARAMETER)


def errors_of(states: list[dict[str, object]], *, strict: bool = True) -> list[str]:
    """Save a and b on two ranks; return what each says to a load into its own state."""
    world = World(2)
    world.play(lambda _, run: run.save(1, {"a": plain(1.0), "b": plain(2.0), "c": 3}).wait())

    def load(rank: int, run: CheckpointManager) -> str:
        with pytest.raises(InvalidError) as caught:
            run.load(states[rank], strict=strict)
        return str(caught.value)

    return [str(each) for each in world.play(load)]


@pytest.mark.parametrize("strict", [True, False])
def test_every_rank_lists_what_differs_on_any(strict: bool) -> None:
    states: list[dict[str, object]] = [
        {"a": other("float32", 7), "b": plain(0.0), "c": 0},
        {"a": plain(0.0), "b": other("float64", 100), "c": 0, "new": 1},
    ]
    first, second = errors_of(states, strict=strict)
    assert first == second
    assert "1 of another shape: a: (7,) here and (100,) in the checkpoint" in first
    assert "1 of another dtype: b (float32 saved, float64 wanted)" in first
    assert "1 missing from the checkpoint: new" in first
    assert states[0]["c"] == 0 and not states[0]["b"].array.any()  # type: ignore[attr-defined]


def test_a_load_that_fills_nothing_is_refused_without_strict_too() -> None:
    first, second = errors_of([{"x": plain(0.0)}, {"y": 1}], strict=False)
    assert first == second
    assert "nothing of the state is in the checkpoint: 2 missing from the checkpoint: x, y" in first
    assert "At its top the checkpoint has c" in first


def test_one_rank_that_fills_something_is_enough() -> None:
    world = World(2)
    world.play(lambda _, run: run.save(1, {"a": plain(1.0)}).wait())
    states: list[dict[str, object]] = [{"a": plain(0.0)}, {"x": 1}]
    assert world.play(lambda rank, run: run.load(states[rank], strict=False)) == [1, 1]


def test_a_count_that_is_not_whole_says_so() -> None:
    world = World(1)
    world.play(lambda _, run: run.save(1, {f"t{number}": plain(0.0, count=1) for number in range(1200)}).wait())
    state = {f"t{number}": plain(0.0, count=2) for number in range(1200)}

    def load(_: int, run: CheckpointManager) -> str:
        with pytest.raises(InvalidError) as caught:
            run.load(state)
        return str(caught.value)

    (said,) = world.play(load)
    assert "at least 1,000 of another shape: t0: (2,) here and (1,) in the checkpoint" in str(said)


def test_ranks_that_lack_very_many_names_must_agree_too() -> None:
    world = World(2)
    world.play(lambda _, run: run.save(1, {"a": plain(1.0), "b": plain(2.0)}).wait())
    target = plain(0.0)

    def load(rank: int, run: CheckpointManager) -> str:
        state: dict[str, object] = {"x": target, **{f"v{number}": number for number in range(10_001)}}
        with pytest.raises(InvalidError) as caught:
            run.load(state, strict=False, rename={"ab"[rank]: "x"})
        return str(caught.value)

    for said in world.play(load):
        assert "rank 0 rename={'a': 'x'}, rank 1 rename={'b': 'x'}" in str(said)
    assert not target.array.any()
