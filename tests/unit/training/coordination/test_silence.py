"""Ranks that say nothing: who asks for them, how often, and how slow a rank may be that goes on writing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.types.reports import SaveReport
from holdfast.errors import InvalidError, UnavailableError
from holdfast.stored.publishing.outcome import Outcome, OutcomeKind
from holdfast.training.coordination.agreement.numbered_save import NumberedSave
from holdfast.training.coordination.agreement.records import SaveVerdict
from holdfast.training.coordination.agreement.save_agreement import SaveAgreement
from holdfast.training.coordination.commit_vote import CommitVote, Vote
from holdfast.training.coordination.job import Job, error_text
from holdfast.training.coordination.message_codec import encode_message
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore, FaultyStore, stall_until
from tests.doubles.framework import NumpyFramework
from tests.support.tuning import tuned
from tests.unit.ranks import HASTY, PATIENT, World, fresh_store, plain, saved, sharded


class CountingKeyValueStore:
    """Counts the calls of all ranks."""

    calls: ClassVar[Counter[str]] = Counter()
    lock: ClassVar = threading.Lock()

    def __init__(self, inner: KeyValueStore) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        with self.lock:
            self.calls[name] += 1
        return getattr(self._inner, name)


@pytest.mark.parametrize("world_size", (8, 32))
def test_one_rank_asks_for_the_silent_rank_after_the_votes(world_size: int) -> None:
    CountingKeyValueStore.calls.clear()

    def part(comm: ThreadComm) -> Outcome | None:
        job = Job(comm, SystemClock(), HASTY)
        if comm.rank == world_size - 1:
            return None
        vote = CommitVote(job, 0, "attempt", "save of step 1")
        vote.vote(Vote(1, "0"))
        return vote.await_outcome()

    outcomes = outcomes_of_ranks(world_size, part, view_of=lambda _, inner: CountingKeyValueStore(inner))  # type: ignore[arg-type, return-value]
    for outcome in outcomes[:-1]:
        assert isinstance(outcome, Outcome) and outcome.kind is OutcomeKind.ABORTED, outcome
        assert f"ranks [{world_size - 1}] did not finish" in str(outcome.error)
    assert CountingKeyValueStore.calls["present"] <= 2 * world_size
    assert CountingKeyValueStore.calls.total() <= 12 * world_size


def test_a_high_rank_of_thousands_waits_until_rank_0_has_asked_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 asks for every rank at its deadline, which takes the longer the more ranks there are."""
    monkeypatch.setattr("holdfast.training.saving.attempt.LATE_SECONDS", 0.5)
    world_size, late = 4096, UnavailableError("ranks [7] did not call save within 0.2 s")

    class HighRank(ThreadComm):
        def all_gather(self, payload: bytes) -> list[bytes]:
            return [payload] * self.world_size

    comm = HighRank(ThreadGroup(world_size), 70)
    job = Job(comm, SystemClock(), replace(HASTY, agreement_timeout_seconds=0.2), NumpyFramework(70))
    run = CheckpointManager.over(fresh_store(), job)

    def refuse() -> None:
        verdict = SaveVerdict((1, ""), refused=error_text(late))
        comm.key_value_store.set(job.key("opening", 0, "verdict"), encode_message(verdict), 5.0)

    threading.Timer(4.0, refuse).start()
    failure = run.save(1, {"step": 1}).failure
    assert isinstance(failure, UnavailableError) and str(late) in str(failure), failure


@pytest.mark.parametrize("world_size", (8, 32))
def test_one_rank_asks_for_the_silent_rank_at_the_agreement(world_size: int) -> None:
    """Rank 0 never calls."""
    CountingKeyValueStore.calls.clear()

    def part(comm: ThreadComm) -> object:
        job = Job(comm, SystemClock(), HASTY)
        if comm.rank == 0:
            return None
        opening = SaveAgreement(job, 1, b"12345678").take_number()
        opening.refuse(UnavailableError("not now"))
        return job.sequence

    outcomes = outcomes_of_ranks(world_size, part, view_of=lambda _, inner: CountingKeyValueStore(inner))  # type: ignore[arg-type, return-value]
    assert outcomes[1:] == [1] * (world_size - 1), outcomes
    assert CountingKeyValueStore.calls["present"] <= 6 * world_size
    assert CountingKeyValueStore.calls.total() <= 16 * world_size


def test_a_rank_that_writes_for_longer_than_the_timeout_aborts_no_save() -> None:
    """It writes for three timeouts of the other rank, a window at a time."""

    def slowly(operation: FaultPoint) -> None:
        time.sleep(0.2)

    store = fresh_store()
    slow = FaultyStore(store, Faults(slowly, names={"upload.write"}, lasting=True))
    settings = tuned(HASTY, windows_in_flight=1)
    world = World(2, settings=settings, store=store, stores={1: slow})

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, 1, {"w": sharded(2, rows=21_000)})

    outcomes = world.play(part)
    assert all(isinstance(each, SaveReport) for each in outcomes), outcomes
    assert any(each.committed_seconds > 3 for each in outcomes), "the test waits for longer than the timeout"  # type: ignore[union-attr, attr-defined]


@pytest.mark.parametrize("is_wrong", (False, True))
def test_no_call_to_the_key_value_store_is_on_the_training_thread(is_wrong: bool) -> None:
    """Such a call may last as long as its limit, and c10d runs no signal handler meanwhile."""
    asking: set[str] = set()
    faults = Faults(lambda _: asking.add(threading.current_thread().name), lasting=True)
    world = World(2, boards={rank: lambda inner: FaultyKeyValueStore(inner, faults) for rank in range(2)})

    def part(rank: int, run: CheckpointManager) -> object:
        return saved(run, -1 if is_wrong else 1, {"w": sharded(2)})

    outcomes = world.play(part)
    assert all(isinstance(each, InvalidError if is_wrong else SaveReport) for each in outcomes), outcomes
    assert asking and not any(name.startswith("rank-") for name in asking), asking


def test_a_save_whose_number_never_comes_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.training.saving.attempt.LATE_SECONDS", 0.2)
    over = threading.Event()
    faults = Faults(stall_until(over), names={"present"})
    settings = replace(PATIENT, agreement_timeout_seconds=1.0)
    world = World(1, settings=settings, boards={0: lambda inner: FaultyKeyValueStore(inner, faults)})

    def part(rank: int, run: CheckpointManager) -> object:
        first = saved(run, 1, {"w": plain(1.0)})
        over.set()
        time.sleep(0.2)
        return first, run._job.sequence, saved(run, 2, {"w": plain(1.0)})

    ((first, sequence, second),) = world.play(part)  # type: ignore[misc]
    assert isinstance(first, UnavailableError) and "key-value store gave no answer" in str(first), first
    assert sequence == 0 and isinstance(second, SaveReport), (sequence, second)


def test_a_save_that_a_signal_handler_makes_meanwhile_has_a_number_of_its_own() -> None:
    within: list[NumberedSave] = []
    jobs: list[Job] = []

    def handle(_: FaultPoint) -> None:
        within.append(NumberedSave(jobs[0], 3, b"12345678"))
        within[0].take_number()

    def part(rank: int, run: CheckpointManager) -> object:
        jobs.append(run._job)
        interrupted = NumberedSave(run._job, 2, b"12345678")
        interrupted.take_number()
        return within[0].sequence, interrupted.sequence, run._job.sequence

    faults = Faults(handle, names={"present"}, after=True)
    world = World(1, boards={0: lambda inner: FaultyKeyValueStore(inner, faults)})
    assert world.play(part) == [(0, 1, 2)]
