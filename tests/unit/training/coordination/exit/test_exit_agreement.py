"""Ranks far apart leave their loops at the same call, whoever is told to end; nobody waits for a rank in its loop."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.base.clock import SystemClock
from holdfast.base.ports.comm import KeyValueStore
from holdfast.errors import UnavailableError
from holdfast.settings import Settings
from holdfast.training.coordination.exit.exit_agreement import ExitAgreement
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore, raise_error


def played(
    world_size: int,
    part: Callable[[int, ExitAgreement, Job], object],
    *,
    grace_seconds: float = 20.0,
    view_of: Callable[[int, KeyValueStore], KeyValueStore] = lambda _, key_value_store: key_value_store,
) -> list[object]:
    """Return what each rank's part returned; the first error of any rank is raised."""

    def work(comm: ThreadComm) -> object:
        job = Job(comm, SystemClock(), Settings(commit_timeout_seconds=20.0))
        alarm = ExitAgreement(job, grace_seconds)
        try:
            return part(comm.rank, alarm, job)
        finally:
            alarm.close()
            job.close()

    outcomes = outcomes_of_ranks(world_size, work, group=ThreadGroup(world_size), view_of=view_of)
    for each in outcomes:
        if isinstance(each, BaseException):
            raise each
    return outcomes


def await_wake_up(job: Job) -> None:
    """Wait until this rank has reported its count: it passes no further call without the exit call."""
    job.key_value_store.wait([job.key("alarm", "passed", job.comm.rank)], 60.0)


def left_at(
    alarm: ExitAgreement, calls: int, told: int | None, pause: Callable[[int], None] = lambda _: None
) -> int | None:
    """Return at which call of so many a rank leaves that is told to end before one of them; None if it does not."""
    told_at = None
    for call in range(1, calls + 1):
        pause(call)
        if call == told:
            told_at = time.monotonic()
        if alarm.should_stop(told_at):
            return call
    return None


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(1, 9),
    told=st.dictionaries(st.integers(0, 8), st.integers(1, 60), min_size=1, max_size=4),
)
def test_ranks_that_drift_apart_leave_at_one_call(seed: int, world_size: int, told: dict[int, int]) -> None:
    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        chance = random.Random(seed * 11 + rank)

        def pause(call: int) -> None:
            if chance.random() < 0.2:
                time.sleep(chance.random() * 0.004)

        return left_at(alarm, 100_000, told.get(rank), pause) if told.keys() & {*range(world_size)} else None

    first, *others = played(world_size, part)
    assert others == [first] * (world_size - 1), (seed, first, others)
    if isinstance(first, int):
        # Whoever is told first may be far behind the others, yet never leaves before it is told.
        assert first >= min(call for rank, call in told.items() if rank < world_size)


def test_ranks_in_step_leave_at_the_very_call_at_which_all_are_told() -> None:
    together = threading.Barrier(4)

    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        return left_at(alarm, 100, 7, lambda _: together.wait(10))  # type: ignore[arg-type, return-value]

    assert played(4, part) == [7] * 4


def test_a_rank_that_is_far_ahead_is_not_overtaken_and_one_behind_catches_up() -> None:
    ahead = threading.Event()

    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        if rank == 2:
            for _ in range(50):
                assert not alarm.should_stop(None)
            ahead.set()
            # In its fifty-first step, of which nobody else has seen anything.
            await_wake_up(job)
            return 50 + (left_at(alarm, 100, None) or 0)
        assert ahead.wait(60)

        def pause(call: int) -> None:
            if call == 4:
                await_wake_up(job)

        return left_at(alarm, 100, 3 if rank == 1 else None, pause)

    assert played(3, part) == [51, 51, 51]


def test_a_rank_that_waits_for_another_inside_a_step_keeps_nobody_from_agreeing() -> None:
    """As in a pipeline: rank 1 is inside step 6, which rank 0 must take part in."""
    begun = [threading.Event() for _ in range(8)]
    passed = threading.Event()

    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        told_at = None
        for step in range(1, 8):
            if rank == 0:
                begun[step].set()
                if step == 5:
                    # Rank 1 has passed step 5, and waits for rank 0 inside step 6.
                    assert passed.wait(60)
                    told_at = time.monotonic()
            else:
                assert begun[step].wait(60), "rank 0 waits for rank 1, which waits for rank 0"
            if alarm.should_stop(told_at):
                return step
            if rank == 1 and step == 5:
                passed.set()
        return None

    assert played(2, part) == [6, 6]


def test_told_in_the_last_call_a_rank_ends_its_loop_as_the_others_did() -> None:
    closed = threading.Barrier(4)

    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        if rank == 3:
            left = left_at(alarm, 9, None)
            closed.wait(10)
            assert left is None
            return left_at(alarm, 1, 1)
        left = left_at(alarm, 10, None)
        alarm.close()
        closed.wait(10)
        return left

    start = time.monotonic()
    assert played(4, part) == [None] * 4
    assert time.monotonic() - start < 8, "nobody waits for ranks whose loops are over"


def test_a_rank_whose_handing_on_is_over_is_skipped() -> None:
    """Rank 1 would wake ranks 3 and 4; its loop is over, as theirs are about to be."""
    closed = threading.Event()

    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        if rank == 1:
            left = left_at(alarm, 10, None)
            alarm.close()
            closed.set()
            return left
        left_at(alarm, 9, None)
        assert closed.wait(60)
        # Call 10 is the last that rank 1 has passed; all the others may pass it, and none would leave before.
        return left_at(alarm, 2, 1 if rank == 0 else None, lambda call: await_wake_up(job) if call == 2 else None)

    assert played(5, part) == [2, None, 2, 2, 2]


def test_a_rank_that_never_answers_is_waited_for_no_longer_than_the_grace() -> None:
    gone = threading.Event()

    def part(rank: int, alarm: ExitAgreement, job: Job) -> object:
        if rank == 1:
            assert gone.wait(60.0)
            return "silent"
        with pytest.raises(UnavailableError, match="not all ranks reported their call count in time"):
            left_at(alarm, 1_000_000, 2, lambda _: time.sleep(0.001))
        gone.set()
        return "left alone"

    def view(rank: int, key_value_store: KeyValueStore) -> KeyValueStore:
        gone = Faults(raise_error(UnavailableError), names=("get_many",), lasting=True)
        return FaultyKeyValueStore(key_value_store, gone) if rank == 1 else key_value_store

    assert played(2, part, grace_seconds=1.5, view_of=view) == ["left alone", "silent"]


def test_a_key_value_store_that_fails_for_a_while_leaves_a_rank_that_can_be_stopped() -> None:
    """Rank 1 fails to wait for its wake-up, before a signal to rank 0."""
    failed = threading.Event()

    def fail(operation: FaultPoint) -> None:
        failed.set()
        raise UnavailableError(operation.subject)

    failing = Faults(fail, names=("get_many",), lasting=True)

    def part(rank: int, alarm: ExitAgreement, job: Job) -> int | None:
        assert failed.wait(60.0)
        failing.heal()
        return left_at(alarm, 1_000_000, 2 if rank == 0 else None, lambda _: time.sleep(0.001))

    def view(rank: int, key_value_store: KeyValueStore) -> KeyValueStore:
        return FaultyKeyValueStore(key_value_store, failing) if rank == 1 else key_value_store

    first, second = played(2, part, view_of=view)
    assert first == second


def test_a_loop_that_goes_back_is_counted_by_its_calls() -> None:
    def part(rank: int, alarm: ExitAgreement, job: Job) -> tuple[int, ...]:
        steps = [*range(1, 51), *range(10, 60)]
        told_at = None
        for number, step in enumerate(steps):
            if rank == 0 and number == 60:
                told_at = time.monotonic()
            time.sleep(0.0005)
            if alarm.should_stop(told_at):
                return number, step
        return ()

    first, second = played(2, part)
    assert first == second
    number, step = first  # type: ignore[misc]
    assert number >= 60 and step < 60


def test_a_call_without_an_alarm_asks_the_board_nothing() -> None:
    asked = {rank: Faults() for rank in range(2)}

    def part(rank: int, alarm: ExitAgreement, job: Job) -> bool:
        time.sleep(0.2)
        before = asked[rank].counted
        for _ in range(1000):
            assert not alarm.should_stop(None)
        return asked[rank].counted == before

    assert played(2, part, view_of=lambda rank, key_value_store: FaultyKeyValueStore(key_value_store, asked[rank])) == [
        True,
        True,
    ]
