"""What differs by rank at a save, over threads: refused at the first save if data would be lost, else logged once."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import Role
from holdfast.base.types.health import Health
from holdfast.base.types.reports import SaveReport
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import PATIENT, World, plain, saved

ADVICE = ("holdfast.PerRank", "RngState", "holdfast.Sharded", "DTensor", "broadcast", "skip=")


def buffer(values: list[int], dtype: str = "int32") -> GlobalTensor:
    return GlobalTensor(dtype, np.array(values, dtype="int32"), None, Role.BUFFER)


def stateful(**state: object) -> Group:
    return Group("stateful", {"state": state})


def require_reports(outcomes: list[object]) -> list[SaveReport]:
    assert all(isinstance(each, SaveReport) for each in outcomes), outcomes
    return [each for each in outcomes if isinstance(each, SaveReport)]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "): only th" in record.getMessage()]


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
    assert text.startswith("save of step 2: x differs between ranks (ranks [0")
    assert "≠ ranks [" in text and "): only that of rank 0 is saved" in text
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
    first = "(the first: ranks [0] ≠ ranks [1])"
    assert f"x19, x20, x21 and 28 more differ between ranks {first}: only those of ranks [0] are saved" in texts[19]


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ((0, 0, 1, 0), "ranks [0, 1, 3] ≠ ranks [2]"),
        ((1, 2, 2, 1), "ranks [0, 3] ≠ ranks [1, 2]"),
        ((0, 1, 1, 1, 1, 1), "ranks [0] ≠ ranks [1, 2, 3 and 2 more]"),
        ((0, 1, 2, 3), "ranks [0] ≠ ranks [1] ≠ ranks [2] and 1 more"),
    ],
)
def test_the_warning_names_all_ranks_of_each_copy(
    values: tuple[int, ...], groups: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that described nothing too: their state is that of the lowest rank."""
    World(len(values)).play(lambda rank, run: saved(run, 1, {"x": values[rank], "w": plain(1.0)}))
    (text,) = warnings_in(caplog)
    assert f"x differs between ranks ({groups}): only that of rank 0 is saved" in text


LOWEST = replace(PATIENT, replicas="lowest")


def drifting(rank: int, step: int) -> dict[str, object]:
    """Parameters that are equal at step 1; later those of rank 2 differ, and by the end those of every rank."""
    values = {1: 0.0, 2: float(rank == 2), 3: float(rank)}
    return {f"w{number}": plain(values[step] + number, count=100 + number) for number in range(5)} | {"v": plain(9.0)}


def test_replicas_that_drift_are_saved_from_the_lowest_rank_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world = World(3, LOWEST)

    def part(rank: int, run: CheckpointManager) -> object:
        reports = [saved(run, step, drifting(rank, step)) for step in (1, 2, 3)]
        into = drifting(rank, 2)
        run.load(into, 3)
        return reports, into

    names = tuple(f"w{number}" for number in range(5))
    for reports, into in world.play(part):  # type: ignore[misc]
        assert [report.divergent for report in require_reports(reports)] == [(), names, names]
        assert [bool(report.unhealthy) for report in reports] == [False, True, True]
        assert all((into[name].array == drifting(0, 3)[name].array).all() for name in into)  # type: ignore[attr-defined]
    # Parameters and their moments must come from one rank: the lowest writes all of them.
    assert {piece.pack for pieces in world.pieces(3).values() for piece in pieces} == {"r00000.safetensors"}
    assert len({piece.pack for pieces in world.pieces(1).values() for piece in pieces}) == 3
    health = [world.manifest(step).health for step in (1, 2, 3)]
    assert health[0] is None and world.manifest(2).healthy is False
    assert health[1] == Health(divergent=dict.fromkeys(names, (2,)))
    assert health[2] == Health(divergent=dict.fromkeys(names, (0, 1, 2)), undecided=names)
    (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert text.startswith("save of step 2: 5 replicated tensors differ between ranks: w0, w1, w2 and 2 more")
    assert "those of the lowest rank are saved" in text and "replicas='lowest'" in text and "unhealthy" in text


def test_a_plan_for_drifted_replicas_is_not_kept_for_equal_ones() -> None:
    world = World(3, LOWEST)

    def part(rank: int, run: CheckpointManager) -> object:
        return [saved(run, number, drifting(rank, step)) for number, step in enumerate((1, 3, 1, 3))]

    for reports in world.play(part):
        assert isinstance(reports, list)
        assert [report.planned for report in require_reports(reports)] == [True, True, False, False]
    packs = [{piece.pack for pieces in world.pieces(step).values() for piece in pieces} for step in range(4)]
    assert [len(each) for each in packs] == [3, 1, 3, 1]


def test_the_lowest_ranks_is_never_saved_for_another_shape() -> None:
    world = World(2, LOWEST)
    for outcome in world.play(lambda rank, run: saved(run, 1, {"half": plain(0.0, count=10 + rank)})):
        assert isinstance(outcome, InvalidError) and "[10] on rank 0" in str(outcome)


@pytest.mark.parametrize("kind", REFUSED)
def test_the_lowest_ranks_is_saved_at_the_first_save_if_asked(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(2, LOWEST)
    outcomes = world.play(lambda rank, run: saved(run, 1, {"x": REFUSED[kind](rank), "w": plain(1.0)}))
    assert [report.divergent for report in require_reports(outcomes)] == [("x",), ("x",)]
    assert len(warnings_in(caplog)) == 1 and world.manifest(1).health is None


def test_a_refusal_names_the_setting() -> None:
    for outcome in World(2).play(lambda rank, run: saved(run, 1, {"w": plain(float(rank))})):
        assert isinstance(outcome, InvalidError) and "Settings(replicas='lowest')" in str(outcome)


def test_other_answers_for_replicas_are_refused() -> None:
    with pytest.raises(InvalidError, match=r"replicas='mean'; expected 'refuse' or 'lowest'"):
        replace(PATIENT, replicas="mean")  # type: ignore[arg-type]


def test_it_is_the_lowest_rank_that_holds_it_whose_value_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": plain(1.0), **({"x": rank} if rank else {})})

    World(3).play(part)
    (text,) = warnings_in(caplog)
    assert "only that of rank 1 is saved" in text
