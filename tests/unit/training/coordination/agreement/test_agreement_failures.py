"""An agreement whose key-value store fails on one rank: nobody waits for that rank, and the next save works."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.publishing.outcome import OutcomeKind
from holdfast.training.coordination.commit_vote import CommitVote, Vote
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, ThreadGroup
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore, raise_error
from tests.unit.ranks import HASTY, PATIENT, World, plain, saved, sharded

OPERATIONS = {"set", "get_many", "present", "compare_set"}


@pytest.mark.parametrize("rank_of_fault", (0, 1))
@pytest.mark.parametrize("after", (False, True))
@pytest.mark.parametrize("at", range(1, 6))
def test_nobody_waits_for_a_rank_whose_key_value_store_fails_once(rank_of_fault: int, after: bool, at: int) -> None:
    faults = Faults(None, names=OPERATIONS, at=at, after=after)
    world = World(2, settings=PATIENT, boards={rank_of_fault: lambda inner: FaultyKeyValueStore(inner, faults)})
    both = ThreadGroup(2)

    def part(rank: int, run: CheckpointManager) -> object:
        first = saved(run, 1, {"w": sharded(2)})
        both.meet(rank, None)
        if rank == rank_of_fault:
            faults.counted, faults._action = 0, raise_error(UnavailableError)
        start = time.monotonic()
        second = saved(run, 2, {"w": sharded(2)})
        waited = time.monotonic() - start
        both.meet(rank, None)
        faults.heal()
        both.meet(rank, None)
        return first, second, waited, saved(run, 3, {"w": sharded(2)})

    for first, second, waited, third in world.play(part):  # type: ignore[misc]
        assert isinstance(first, SaveReport)
        assert isinstance(second, SaveReport | UnavailableError), second
        assert waited < PATIENT.commit_timeout_seconds / 2, (waited, second)
        assert isinstance(third, SaveReport), third
    assert faults.met


def test_a_rank_that_failed_alone_is_named_to_the_others() -> None:
    faults = Faults(raise_error(UnavailableError), names={"set"})
    world = World(2, boards={1: lambda inner: FaultyKeyValueStore(inner, faults)})
    outcomes = world.play(lambda rank, run: saved(run, 1, {"w": sharded(2)}))
    assert all(isinstance(each, UnavailableError) for each in outcomes), outcomes
    assert "rank 1" in str(outcomes[0])


def test_a_late_rank_takes_the_refusal_at_once_without_collecting_its_state() -> None:
    world = World(2, settings=replace(HASTY, commit_timeout_seconds=20.0, agreement_timeout_seconds=1.0))
    both = ThreadGroup(2)

    class Unasked:
        @property
        def dtype(self) -> str:
            raise AssertionError("the state was collected")

    def part(rank: int, run: CheckpointManager) -> object:
        first = saved(run, 1, {"w": sharded(2)}) if rank == 0 else None
        both.meet(rank, None)
        if rank == 1:
            first = saved(run, 1, {"w": Unasked()})
        return first, saved(run, 2, {"w": sharded(2)})

    outcomes = world.play(part)
    for first, second in outcomes:  # type: ignore[misc]
        assert isinstance(first, UnavailableError), first
        assert "ranks [1] did not call save within 1 s" in str(first) and "agreement_timeout_seconds" in str(first)
        assert isinstance(second, SaveReport), second


@pytest.mark.parametrize(
    ("settings", "group_seconds", "expected"),
    [
        (Settings(), None, 300.0),
        (Settings(), 600.0, 300.0),
        (Settings(), 20.0, 10.0),
        (Settings(commit_timeout_seconds=5.0), 600.0, 5.0),
        (Settings(agreement_timeout_seconds=900.0), 20.0, 900.0),
    ],
)
def test_the_agreement_ends_well_before_the_collectives_of_the_training(
    settings: Settings, group_seconds: float | None, expected: float
) -> None:
    comm = ThreadComm(ThreadGroup(1), 0)
    comm.timeout_seconds = group_seconds
    assert Job(comm, SystemClock(), settings).agreement_seconds == expected


@pytest.mark.parametrize("wrong", (0.0, -1.0, float("inf")))
def test_a_timeout_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidError, match="agreement_timeout_seconds"):
        Settings(agreement_timeout_seconds=wrong)


@pytest.mark.parametrize("after", (False, True))
def test_a_rank_whose_decision_to_publish_got_no_reply_aborts_for_certain(after: bool) -> None:
    faults = Faults(raise_error(UnavailableError), names={"compare_set"}, after=after)
    comm = ThreadComm(ThreadGroup(1), 0)
    comm.key_value_store = FaultyKeyValueStore(comm.key_value_store, faults)
    vote = CommitVote(Job(comm, SystemClock(), PATIENT), 0, "attempt", "save")
    with pytest.raises(UnavailableError):
        vote.vote(Vote(1, "0"))
    assert vote.abort(UnavailableError("no reply")).kind is OutcomeKind.ABORTED
    assert vote.await_outcome().kind is OutcomeKind.ABORTED, "the other ranks hear of it at once"


def test_a_rank_that_fails_after_the_verdict_aborts_the_save_for_the_others() -> None:
    """It cannot read which of its plain tensors the other class holds too."""

    def fail_once(operation: FaultPoint) -> None:
        if "/shared/" in operation.subject and not failed:
            failed.append(operation.subject)
            raise UnavailableError("no answer")

    failed: list[str] = []
    faults = Faults(fail_once, names={"get_many"}, lasting=True)
    world = World(2, boards={1: lambda inner: FaultyKeyValueStore(inner, faults)})
    states = {"tied": plain(1.0), "own": plain(2.0)}, {"tied": plain(1.0)}
    outcomes = world.play(lambda rank, run: [saved(run, step, states[rank]) for step in (1, 2)])
    assert len(failed) == 1
    for first, second in outcomes:  # type: ignore[misc]
        assert isinstance(first, UnavailableError) and "no answer" in str(first), first
        assert isinstance(second, SaveReport), second
    assert "rank 1 aborted" in str(outcomes[0][0])  # type: ignore[index]
