"""What differs by rank at a save, over threads: refused at the first save if data would be lost, else logged once."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from holdfast.checkpoint_manager import CheckpointManager
from holdfast.errors import InvalidError
from holdfast.geometry.tensor import Role
from holdfast.testing.framework import GlobalTensor
from holdfast.types.reports import SaveReport
from holdfast.types.values import Group
from tests.unit.ranks import World, plain, saved

ADVICE = ("holdfast.PerRank", "RngState", "holdfast.Sharded", "DTensor", "broadcast", "skip=")


def buffer(values: list[int], dtype: str = "int32") -> GlobalTensor:
    return GlobalTensor(dtype, np.array(values, dtype="int32"), None, Role.BUFFER)


def stateful(**state: object) -> Group:
    return Group("stateful", {"state": state})


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " between ranks: only " in record.getMessage()]


REFUSED = {
    "an integer buffer of several elements": lambda rank: buffer([rank, 1]),
    "an object": lambda rank: stateful(position=rank),
    "an object with other keys": lambda rank: stateful(**{f"rank{rank}": 1}),
    "an object with an empty state on one rank": lambda rank: stateful() if rank else stateful(a=1),
}
LOGGED = {
    "a value": lambda rank: rank,
    "a counter": lambda rank: buffer([rank]),
    "a buffer of floats": lambda rank: plain(float(rank), role=Role.BUFFER),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_lost_is_refused_at_the_first_save(kind: str) -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        refused = saved(run, 1, {"x": REFUSED[kind](rank), "w": plain(1.0)})
        return refused, saved(run, 2, {"x": REFUSED[kind](1), "w": plain(1.0)})

    outcomes = world.play(part)
    for first, second in outcomes:  # type: ignore[misc]
        assert isinstance(first, InvalidError), first
        assert "save of step 1: " in str(first) and "x (ranks [0] ≠ ranks [1" in str(first)
        for words in ADVICE:
            assert words in str(first), str(first)
        assert isinstance(second, SaveReport), second
    assert world.committed() == [2]


@pytest.mark.parametrize("kind", [*REFUSED, *LOGGED])
def test_what_comes_to_differ_later_is_saved_and_logged_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(3)
    made = {**REFUSED, **LOGGED}[kind]

    def part(rank: int, run: CheckpointManager) -> object:
        return [saved(run, step, {"x": made(rank if step > 1 else 1), "w": plain(1.0)}) for step in (1, 2, 3)]

    for reports in world.play(part):
        assert isinstance(reports, list)
        assert [report.divergent for report in reports] == [(), ("x",), ("x",)]
    (text,) = warnings_in(caplog)
    assert text.startswith("save of step 2: x differs between ranks: only that of rank 0 is saved")
    for words in ADVICE:
        assert words in text


@pytest.mark.parametrize("kind", LOGGED)
def test_what_differs_in_ordinary_runs_is_logged_at_the_first_save(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        state = {"x": LOGGED[kind](rank), "y": LOGGED[kind](rank), "w": plain(1.0)}
        return [saved(run, step, state) for step in (1, 2)]

    for reports in World(2).play(part):
        assert isinstance(reports, list)
        assert [report.divergent for report in reports] == [("x", "y")] * 2
    assert [text.partition(" differs")[0] for text in warnings_in(caplog)] == ["save of step 1: x", "save of step 1: y"]


def test_many_names_are_one_line_beyond_twenty(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {f"x{number:02}": rank for number in range(50)} | {"w": plain(1.0)})

    World(2).play(part)
    texts = warnings_in(caplog)
    assert len(texts) == 20 and "x18 differs" in texts[18]
    assert "x19, x20, x21 and 28 more differ between ranks: only those of ranks [0] are saved" in texts[19]


def test_it_is_the_lowest_rank_that_holds_it_whose_value_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": plain(1.0), **({"x": rank} if rank else {})})

    World(3).play(part)
    (text,) = warnings_in(caplog)
    assert "only that of rank 1 is saved" in text
