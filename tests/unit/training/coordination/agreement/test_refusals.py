"""Which refusals a call raises: those of the first save, alike on every rank. Later ones live in the handle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.errors import InvalidError, UnavailableError
from holdfast.training.coordination.agreement.decision import Decision
from holdfast.training.coordination.agreement.records import SaveVerdict
from holdfast.training.saving.fingerprint import StateFingerprint
from tests.doubles.framework import GlobalTensor
from tests.unit.ranks import PATIENT, World, plain, saved, sharded


def kept(run: CheckpointManager, step: int, state: Mapping[str, object]) -> object:
    """Save; return the error that the handle holds, or the error with a mark that the call raised it."""
    try:
        handle = run.save(step, state)
    except Exception as error:
        return "raised", error
    try:
        return handle.wait(timeout=25.0)
    except Exception as error:
        return error


def halves(rank: int) -> dict[str, object]:
    return {"half": plain(float(rank))}


def test_replicas_that_come_apart_later_raise_on_no_rank() -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, halves(0))
        return kept(run, 2, halves(rank)), saved(run, 3, halves(0))

    for refused, _ in world.play(part):  # type: ignore[misc]
        assert isinstance(refused, InvalidError) and "half" in str(refused), refused
    assert world.committed() == [1, 3]


@pytest.mark.parametrize("failing", (0, 1))
def test_a_state_that_fails_once_on_one_rank_raises_on_no_rank(failing: int) -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        good = {"w": sharded(2)}
        bad = {**good, "loader": RuntimeError("worker 2 exited")} if rank == failing else good
        saved(run, 1, good)
        return kept(run, 2, bad), saved(run, 3, good)

    for refused, _ in world.play(part):  # type: ignore[misc]
        assert isinstance(refused, InvalidError) and "worker 2 exited" in str(refused), refused
    assert world.committed() == [1, 3]


@pytest.mark.parametrize("failing", (0, 1))
def test_the_first_save_raises_on_every_rank_until_the_ranks_agreed_once(failing: int) -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        bad = {"w": sharded(2), "v": object() if rank == failing else 1}
        return kept(run, 1, bad), kept(run, 2, bad), saved(run, 3, {"w": sharded(2)})

    for first, second, _ in world.play(part):  # type: ignore[misc]
        for refused in (first, second):
            assert isinstance(refused, tuple) and isinstance(refused[1], InvalidError), refused
    assert world.committed() == [3]


def test_failed_saves_max_raises_on_every_rank_and_counts_anew() -> None:
    world = World(2, settings=replace(PATIENT, failed_saves_max=2))

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, halves(0))
        bad = [kept(run, step, halves(rank)) for step in (2, 3, 4)]
        return bad, saved(run, 5, halves(0))

    for bad, _ in world.play(part):  # type: ignore[misc]
        assert [isinstance(each, tuple) for each in bad] == [False, True, False], bad
    assert world.committed() == [1, 5]


def test_failures_after_the_agreement_count_too_and_the_next_call_raises() -> None:
    world = World(2, settings=replace(PATIENT, failed_saves_max=1))

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, halves(0))
        run._job.history.note_failed()
        return kept(run, 2, halves(0)), saved(run, 3, halves(0))

    for refused, _ in world.play(part):  # type: ignore[misc]
        assert isinstance(refused, tuple) and isinstance(refused[1], UnavailableError), refused
        assert "the last saves failed, 1 in a row" in str(refused[1])
    assert world.committed() == [1, 3]


def test_the_log_line_of_a_failure_counts_and_says_how_long_ago_the_last_commit_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, halves(0))
        for step in (2, 3):
            run.save(step, halves(rank))
        return None

    with caplog.at_level(logging.ERROR, logger="holdfast"):
        World(2).play(part)
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert any("failure 2 in a row; the last commit was 0 s ago" in line for line in lines), lines


@pytest.mark.parametrize("wrong", (0, -1))
def test_a_number_of_failures_below_one_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidError, match="failed_saves_max"):
        replace(PATIENT, failed_saves_max=wrong)


WRONG_CALLS = {
    "the state": lambda run: run.save(2, None),
    "the step": lambda run: run.save(-2, {"w": plain(0)}),
    "the arguments": lambda run: run.save({"w": plain(0)}, 2),
    "a pattern": lambda run: run.save(2, {"w": plain(0)}, only=3),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
@pytest.mark.parametrize("failing", (0, 1, 2))
def test_a_call_that_is_wrong_on_one_rank_raises_on_every_rank(failing: int, wrong: str) -> None:
    world = World(3)

    def part(rank: int, run: CheckpointManager) -> object:
        good = {"w": plain(0)}
        saved(run, 1, good)
        with pytest.raises(InvalidError) as raised:
            WRONG_CALLS[wrong](run) if rank == failing else run.save(2, good)
        return str(raised.value), saved(run, 3, good)

    texts = [text for text, _ in world.play(part)]  # type: ignore[misc]
    assert len(set(texts)) == 1 and f"rank {failing} refused: " in texts[0], texts
    assert world.committed() == [1, 3]


def test_a_call_that_is_wrong_on_every_rank_raises_on_every_rank() -> None:
    world = World(2)

    def part(rank: int, run: CheckpointManager) -> object:
        with pytest.raises(InvalidError, match=r"rank 0 refused: save\(step, state\): state is NoneType"):
            run.save(1, None)  # type: ignore[arg-type]
        return saved(run, 1, {"w": plain(0)})

    world.play(part)
    assert world.committed() == [1]


def test_a_wrong_call_that_the_others_refuse_for_its_absence_raises_on_no_rank() -> None:
    world = World(2, settings=replace(PATIENT, agreement_timeout_seconds=0.5))
    refused = threading.Event()

    def part(rank: int, run: CheckpointManager) -> object:
        if rank == 0:
            error = kept(run, 1, {"w": plain(0)})
            refused.set()
        else:
            assert refused.wait(60.0)
            error = kept(run, 1, None)  # type: ignore[arg-type]
        return error, saved(run, 2, {"w": plain(0)})

    errors = [error for error, _ in world.play(part)]  # type: ignore[misc]
    assert isinstance(errors[0], UnavailableError) and "ranks [1] did not call save" in str(errors[0])
    assert isinstance(errors[1], InvalidError) and "state is NoneType" in str(errors[1])
    assert world.committed() == [2]


@pytest.mark.parametrize("failing", (0, 1))
@pytest.mark.parametrize("asked", ("details", "sibling_samples"))
def test_a_rank_that_fails_where_rank_0_asks_it_refuses_at_once_and_all_raise(
    monkeypatch: pytest.MonkeyPatch, asked: str, failing: int
) -> None:
    real = getattr(StateFingerprint, asked)

    def answer(self: StateFingerprint, *arguments: object) -> object:
        if self._slots.rank == failing:
            raise InvalidError("it is gone")
        return real(self, *arguments)

    monkeypatch.setattr(StateFingerprint, asked, answer)
    world = World(2, settings=replace(PATIENT, commit_timeout_seconds=600.0))

    def part(rank: int, run: CheckpointManager) -> object:
        on_sibling = GlobalTensor("float32", np.ones(4, dtype=np.float32), MeshLayout((1,), (rank,), (Placement(0),)))
        differing = {"n": rank} if asked != "sibling_samples" else {}
        return kept(run, 1, {"w": on_sibling, **differing})

    for outcome in world.play(part):
        raised, error = outcome  # type: ignore[misc]
        assert raised and isinstance(error, InvalidError) and "it is gone" in str(error), outcome


def test_rank_0_that_fails_to_judge_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: Decision, records: object) -> SaveVerdict:
        raise KeyError("no such rank")

    monkeypatch.setattr(Decision, "on_statements", judge)
    world = World(2, settings=replace(PATIENT, commit_timeout_seconds=600.0))
    for outcome in world.play(lambda _, run: kept(run, 1, {"w": sharded(2)})):
        assert isinstance(outcome, UnavailableError) and "KeyError: 'no such rank'" in str(outcome), outcome


def test_saves_that_fail_without_end_leave_few_keys() -> None:
    """Without a commit in between, which removes them: each is refused once all ranks have stated."""
    world, boards = World(2), []

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, halves(0))
        for step in range(2, 202):
            assert isinstance(saved(run, step, halves(rank)), InvalidError)
        boards.append(run._job.key_value_store)
        return run._job

    jobs = world.play(part)
    assert len({id(board) for board in boards}) == 1
    keys = [key for key in boards[0]._values if "/opening/" in key]  # type: ignore[attr-defined]
    assert len(keys) <= 12, keys
    assert all(len(job._keys) <= 12 for job in jobs)  # type: ignore[attr-defined]
