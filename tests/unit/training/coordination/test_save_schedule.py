"""Ranks far apart decide alike which steps are saved; requests come through; nobody waits for who waits for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.backends.alone import InProcessKeyValueStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.comm import KeyValueStore
from holdfast.core.engine import background
from holdfast.policies import AllOf, AnyOf, EveryNSteps, EverySeconds, OnRequest, SavePolicy
from holdfast.settings import Settings
from holdfast.training.coordination import announcements, announcer
from holdfast.training.coordination import save_due as plan
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_schedule import Schedule
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore


class SetClock(SystemClock):
    """A clock that goes as it is told."""

    def __init__(self) -> None:
        self.seconds = 5000.0

    def monotonic_seconds(self) -> float:
        return self.seconds


def played(
    world_size: int,
    policy: SavePolicy,
    part: Callable[[int, Schedule, Job], object],
    *,
    timeout_seconds: float = 20.0,
    group: ThreadGroup | None = None,
    view_of: Callable[[int, KeyValueStore], KeyValueStore] = lambda _, key_value_store: key_value_store,
) -> list[object]:
    def work(comm: ThreadComm) -> object:
        job = Job(comm, SystemClock(), Settings(commit_timeout_seconds=timeout_seconds))
        try:
            return part(comm.rank, Schedule(job, policy), job)
        finally:
            job.close()

    outcomes = outcomes_of_ranks(world_size, work, group=group or ThreadGroup(world_size), view_of=view_of)
    for each in outcomes:
        if isinstance(each, BaseException):
            raise each
    return outcomes


def step_through(schedule: Schedule, steps: list[int]) -> list[int]:
    saved = []
    for step in steps:
        if schedule.is_due(step):
            schedule.note_saved(step)
            saved.append(step)
    return saved


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(2, 4),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 59)), max_size=4),
    back_to=st.one_of(st.none(), st.integers(0, 30)),
)
def test_ranks_that_drift_apart_decide_alike(
    seed: int, world_size: int, asks: list[tuple[int, int]], back_to: int | None
) -> None:
    policy = AnyOf(EveryNSteps(17), OnRequest(), AllOf(EveryNSteps(2), EverySeconds(0.02)))
    steps = [*range(60), *([] if back_to is None else range(back_to, 60))]

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        chance = random.Random(seed * 7 + rank)
        saved = []
        for number, step in enumerate(steps):
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.004)
            if number < 60 and (rank, step) in asks:
                schedule.request()
            if schedule.is_due(step):
                schedule.note_saved(step)
                saved.append(step)
        return saved

    first, *others = played(world_size, policy, part)
    assert all(each == first for each in others), (seed, first, others)
    assert {0, 17, 34, 51} <= set(first)  # type: ignore[arg-type]


def test_a_request_of_one_rank_is_saved_by_all_a_step_or_two_later() -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        saved = []
        for step in range(1, 30):
            # Steps as slow as this are announced one ahead.
            time.sleep(0.1)
            if rank == 2 and step == 10:
                schedule.request()
            if schedule.is_due(step):
                schedule.note_saved(step)
                saved.append(step)
        return saved

    first, *others = played(3, OnRequest(), part)
    assert others == [first, first]
    (step,) = first  # type: ignore[misc]
    assert 10 < step <= 26, "within about the time that is announced ahead"


def test_requests_of_all_ranks_at_one_step_are_one_save() -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        saved = []
        for step in range(1, 300):
            if step == 10:
                schedule.request()
            if schedule.is_due(step):
                schedule.note_saved(step)
                saved.append(step)
        return saved

    first, *others = played(3, OnRequest(), part)
    assert others == [first, first]
    assert len(first) == 1  # type: ignore[arg-type]


def test_one_process_alone_does_at_once_what_is_asked() -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> None:
        clock = SetClock()
        job.clock = clock
        assert step_through(schedule, [1, 2]) == []
        schedule.request()
        assert step_through(schedule, [3, 4]) == [3]
        clock.seconds += 59
        assert step_through(schedule, [5]) == []
        clock.seconds += 1
        assert step_through(schedule, [6, 7]) == [6]
        # A save that the loop made by itself counts from there, too.
        clock.seconds += 59
        assert step_through(schedule, [8]) == []
        schedule.note_saved(8)
        clock.seconds += 59
        assert step_through(schedule, [9]) == []

    played(1, AnyOf(EverySeconds(60), OnRequest()), part)


def test_what_was_just_loaded_or_saved_is_not_saved_again_and_a_loop_may_go_back() -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        schedule.note_loaded(10)
        saved = step_through(schedule, [10, 11, 20, 20, 30])
        schedule.note_loaded(20)
        return saved + step_through(schedule, [20, 25, 30])

    for policy in (EveryNSteps(10), AnyOf(EveryNSteps(10), OnRequest())):
        assert played(2, policy, part) == [[20, 30, 30]] * 2


def test_a_request_that_no_step_has_served_survives_going_back() -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        assert step_through(schedule, [100, 101]) == []
        if rank == 1:
            schedule.request()
        # Announced for later steps than these two, and then the loop goes back.
        saved = step_through(schedule, [102])
        for step in range(50, 200):
            time.sleep(0.003)
            saved += step_through(schedule, [step])
        return saved

    first, second = played(2, OnRequest(), part)
    assert first == second
    assert len(first) == 1  # type: ignore[arg-type]


def test_a_rank_ahead_waits_for_the_word_of_rank_0_and_not_the_other_way_round() -> None:
    reached = [0, 0]
    released = threading.Event()

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        if rank == 0:
            assert step_through(schedule, [1]) == []
            # Rank 1 gets no further than was announced: to step 2.
            deadline = time.monotonic() + 10
            while reached[1] < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.1)
            assert reached[1] == 2
            schedule.request()
            released.set()
        saved = []
        for step in range(1 if rank else 2, 100):
            saved += step_through(schedule, [step])
            reached[rank] = step
        return saved

    first, second = played(2, OnRequest(), part)
    assert first == second
    assert len(first) == 1 and released.is_set()  # type: ignore[arg-type]


def test_without_rank_0_a_loop_goes_on_and_steps_count(caplog: pytest.LogCaptureFixture) -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        # Rank 0 stays away, as if it hung.
        return [] if rank == 0 else step_through(schedule, list(range(1, 50)))

    start = time.monotonic()
    _, saved = played(2, AnyOf(EveryNSteps(20), OnRequest(), EverySeconds(1e-9)), part, timeout_seconds=0.5)
    assert saved == [20, 40]
    assert time.monotonic() - start < 10, "it waits once, not at every step"
    assert sum("announcements of rank 0 are not available" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["holdfast-announcements", "holdfast-call"])
@pytest.mark.parametrize("refusals", [1, 3, 1000])
def test_a_thread_that_cannot_be_started_ends_no_training(
    name: str, refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, start = [name] * refusals, threading.Thread.start

    def start_later(self: threading.Thread) -> None:
        if self.name in refused:
            refused.remove(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        if rank == 1:
            schedule.request()
        return step_through(schedule, list(range(1, 70)))

    monkeypatch.setattr(threading.Thread, "start", start_later)
    monkeypatch.setattr(background, "DAEMON_POOL", background.DaemonCalls())
    monkeypatch.setattr(announcements, "DAEMON_POOL", background.DAEMON_POOL)
    first, second = played(2, AnyOf(EveryNSteps(20), OnRequest()), part, timeout_seconds=5.0)
    assert first == second
    assert {20, 40, 60} <= set(first)  # type: ignore[call-overload]


def test_a_rank_waits_for_rank_0_no_longer_than_a_collective_of_the_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 may wait for it there: it could not store its announcements, and went on."""
    monkeypatch.setattr(ThreadComm, "timeout_seconds", 1.0)

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        return [] if rank == 0 else step_through(schedule, [10, 20])

    assert played(2, AnyOf(EveryNSteps(20), OnRequest()), part, timeout_seconds=600.0)[1] == [20]


def test_steps_alone_put_nothing_on_the_board_and_announcements_do_not_pile_up() -> None:
    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        return step_through(schedule, list(range(20_000)))

    group = ThreadGroup(2)
    key_value_store: InProcessKeyValueStore = group.key_value_store
    played(2, EveryNSteps(10_000), part, group=group)
    assert not [key for key in key_value_store.keys() if "schedule" in key]  # noqa: SIM118 - a method of ours

    together = threading.Barrier(2, timeout=60)

    def part_in_step(rank: int, schedule: Schedule, job: Job) -> None:
        # Ranks of a training meet in its collectives. Without them rank 0 would be at its end long before rank 1.
        for first in range(0, 20_000, 500):
            step_through(schedule, list(range(first, first + 500)))
            together.wait()

    group = ThreadGroup(2)
    played(2, AnyOf(EveryNSteps(10_000), OnRequest()), part_in_step, group=group)
    left = [key for key in group.key_value_store.keys() if "schedule" in key]  # noqa: SIM118 - a method of ours
    assert len(left) < 300, "of more than six hundred"


def failing_for_a_while(*, at: int, calls: int, after: bool) -> Faults:
    """Return what makes so many calls to a board fail: before anything is done, or after it was."""
    left = [calls]

    def act(operation: FaultPoint) -> None:
        if left[0]:
            left[0] -= 1
            raise TimeoutError(f"{operation.name}: no answer")

    return Faults(act, at=at, lasting=True, after=after)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(2, 4),
    failing=st.integers(0, 3),
    first=st.integers(1, 12),
    length=st.integers(1, 5),
    is_done=st.booleans(),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=3),
    back_to=st.one_of(st.none(), st.integers(0, 10)),
)
def test_ranks_agree_again_after_a_board_that_failed_at_any_call(
    seed: int,
    world_size: int,
    failing: int,
    first: int,
    length: int,
    is_done: bool,
    asks: list[tuple[int, int]],
    back_to: int | None,
) -> None:
    policy = AnyOf(EveryNSteps(17), OnRequest(), AllOf(EveryNSteps(2), EverySeconds(0.02)))
    steps = [*([] if back_to is None else range(30)), *range(back_to or 0, 260)]
    faults = failing_for_a_while(at=first, calls=length, after=is_done)

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        chance = random.Random(seed * 7 + rank)
        saved = []
        for step in steps:
            time.sleep(0.0005 if chance.random() < 0.9 else chance.random() * 0.004)
            if (rank, step) in asks:
                schedule.request()
            saved += step_through(schedule, [step])
        return [step for step in saved if step > 180]

    def view(rank: int, key_value_store: KeyValueStore) -> KeyValueStore:
        return FaultyKeyValueStore(key_value_store, faults) if rank == failing % world_size else key_value_store

    with pytest.MonkeyPatch.context() as patch:
        # As if steps were slow: many announcements, and not one for all steps.
        patch.setattr(plan, "AHEAD_CALLS_MAX", 6)
        first_saved, *others = played(world_size, policy, part, view_of=view)
    assert faults.met
    assert all(each == first_saved for each in others), (seed, first_saved, others)
    assert {187, 204, 221, 238, 255} <= set(first_saved)  # type: ignore[arg-type]


def test_ranks_agree_again_after_rank_0_stood_still_for_longer_than_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if steps were slow: many announcements.
    monkeypatch.setattr(plan, "AHEAD_CALLS_MAX", 6)
    is_still, is_missed, goes_on = threading.Event(), threading.Event(), threading.Event()

    class Impatient(FaultyKeyValueStore):
        """Waits half a second for rank 0 while that stands still, else longer than any machine is busy."""

        def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
            try:
                return super().get_many(keys, 0.5 if is_still.is_set() else timeout_seconds)
            except TimeoutError:
                is_missed.set()
                raise

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        saved = []
        for step in range(1, 200):
            if rank == 0 and step == 20:
                is_still.set()
                assert is_missed.wait(60.0)
                is_still.clear()
            if rank == 0 and step == 60:
                goes_on.set()
            if rank == 1 and step in (20, 130):
                assert (is_still if step == 20 else goes_on).wait(60.0)
            time.sleep(0.01)
            saved += step_through(schedule, [step])
        return saved

    def view(rank: int, key_value_store: KeyValueStore) -> KeyValueStore:
        return Impatient(key_value_store, Faults()) if rank == 1 else key_value_store

    first, second = played(2, EverySeconds(0.1), part, timeout_seconds=60.0, view_of=view)
    assert first != second, "what rank 1 could not know it did not do"
    later = [step for step in first if step > 150]  # type: ignore[attr-defined]
    assert len(later) > 1 and later == [step for step in second if step > 150]  # type: ignore[attr-defined]


def test_a_request_that_was_counted_and_never_named_holds_rank_0_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "_REQUEST_SECONDS", 0.3)

    def part(rank: int, schedule: Schedule, job: Job) -> list[int]:
        if rank == 1:
            # As if it had ended between the two.
            job.key_value_store.add(job.key("schedule", 0, "asks"), 1, 5.0)
        saved = []
        for step in range(1, 100):
            time.sleep(0.02)
            if rank == 1 and step == 20:
                schedule.request()
            saved += step_through(schedule, [step])
        return saved

    start = time.monotonic()
    first, second = played(2, OnRequest(), part)
    assert first == second and len(first) == 1  # type: ignore[arg-type]
    assert time.monotonic() - start < 5


def test_a_save_in_a_handler_that_interrupts_a_decision_does_not_answer_it() -> None:
    """The handler saves another step. Its event is handled by the call that it interrupted."""

    def part(_: int, schedule: Schedule, job: Job) -> list[bool]:
        really, answers = schedule._handle, list[bool]()

        def handle(event: Any) -> bool | None:
            answer = really(event)
            if event.kind == "decide" and event.step == 10 and answer:
                schedule.note_saved(7)
            return answer

        schedule._handle = handle  # type: ignore[method-assign]
        for step in range(1, 12):
            answers.append(schedule.is_due(step))
            if answers[-1]:
                schedule.note_saved(step)
        return answers

    (answers,) = played(1, EveryNSteps(10), part)
    assert answers == [step == 10 for step in range(1, 12)]
