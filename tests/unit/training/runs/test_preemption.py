"""Told to end, ranks leave at one step with one exit code, and the code says what lies in the store."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError, ConflictError, Preempted, UnavailableError
from holdfast.policies import BestN, EveryNSteps, KeepPolicy, Policies
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import none_allowed
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.exit.signals import Signals
from holdfast.training.coordination.job import Job
from holdfast.training.runs.preemption import PreemptionHandler
from holdfast.training.saving.attempt import SaveAttempt
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyKeyValueStore, FaultyStore, raise_error
from tests.doubles.framework import NumpyFramework
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.ranks import PATIENT, fresh_store, plain, sharded


class Told(Signals):
    """Ranks that are threads hear no signals: they are told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__((), clock)

    def take(self) -> None:
        """Take nothing."""

    def tell(self) -> None:
        self.received = 15, self._clock.monotonic_seconds()


@dataclass
class Rank:
    """One rank and its run."""

    number: int
    size: int
    run: CheckpointManager
    signals: Told

    def train(
        self, steps: int, *, told: int | None = None, pause: Callable[[int], None] = lambda _: None, first: int = 1
    ) -> None:
        """Call `maybe_save` after every step; a rank that is told to end is so just before one."""
        for step in range(first, steps + 1):
            pause(step)
            if step == told:
                self.signals.tell()
            self.run.maybe_save(step, state_of(step, self.size))


def state_of(step: int, world_size: int) -> dict[str, object]:
    return {"w": sharded(world_size, rows=64), "p": plain(float(step), count=3000), "step": step}


@dataclass
class World:
    """A job of threads that may be told to end."""

    size: int
    grace_seconds: float = 10.0
    every: int = 1_000_000
    keep: KeepPolicy | None = None
    settings: Settings = PATIENT
    store: MemoryStore = field(default_factory=fresh_store)
    stores: Mapping[int, Store] = field(default_factory=dict)
    boards: Mapping[int, Callable[[KeyValueStore], KeyValueStore]] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)

    def play(self, part: Callable[[Rank], object]) -> list[object]:
        """Return what each rank's part returned, or how it left."""

        def work(comm: ThreadComm) -> object:
            job = Job(comm, self.clock, self.settings, NumpyFramework(comm.rank))
            signals = Told(self.clock)
            departure = PreemptionHandler(job, signals, self.grace_seconds)
            run = CheckpointManager.over(
                self.stores.get(comm.rank, self.store),
                job,
                none_allowed,
                Policies(EveryNSteps(self.every), self.keep),
                preemption_handler=departure,
            )
            try:
                return part(Rank(comm.rank, self.size, run, signals))
            except Preempted as preempted:
                return preempted
            finally:
                try:
                    run.close()
                except UnavailableError as error:
                    assert "received a signal to end" in str(error)

        def view(rank: int, key_value_store: KeyValueStore) -> KeyValueStore:
            return self.boards[rank](key_value_store) if rank in self.boards else key_value_store

        outcomes = outcomes_of_ranks(self.size, work, group=ThreadGroup(self.size), view_of=view)
        for each in outcomes:
            if isinstance(each, BaseException) and not isinstance(each, Preempted):
                raise each
        return outcomes

    def loaded(self) -> tuple[int | None, float]:
        """Return the newest step, and what its tensor holds, as one process finds it."""

        def work(comm: ThreadComm) -> tuple[int | None, float]:
            run = CheckpointManager.over(self.store, Job(comm, SystemClock(), self.settings, NumpyFramework(comm.rank)))
            state = {"p": plain(0.0, count=3000)}
            step = run.load(state, strict=False)
            run.close()
            array = state["p"].array
            assert np.all(array == array[0])
            return step, float(array[0])

        ((step, value),) = [each for each in outcomes_of_ranks(1, work) if not isinstance(each, BaseException)]
        return step, value


def ends(outcomes: list[object]) -> set[tuple[object, int]]:
    """Return how ranks left: code and step of each."""
    assert all(isinstance(each, Preempted) for each in outcomes), outcomes
    return {(each.code, each.step) for each in outcomes if isinstance(each, Preempted)}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    told=st.dictionaries(st.integers(0, 3), st.integers(1, 40), min_size=1, max_size=4),
    every=st.sampled_from([7, 1_000_000]),
)
def test_ranks_leave_together_and_what_they_had_is_saved(seed: int, told: dict[int, int], every: int) -> None:
    world = World(4, every=every)

    def part(rank: Rank) -> None:
        chance = random.Random(seed * 5 + rank.number)

        def pause(step: int) -> None:
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.004)

        rank.train(100_000, told=told.get(rank.number), pause=pause)

    ((code, step),) = ends(world.play(part))
    assert code == 85 and step >= min(told.values())
    assert world.loaded() == (step, float(step))
    assert committed_steps(world.store) == sorted({*range(every, step, every), step})


def slowed(seconds: float, name: str = "upload.write") -> Faults:
    return Faults(lambda _: time.sleep(seconds), names=(name,), lasting=True)


@pytest.mark.parametrize("name", ["upload.write", "upload.complete"])
def test_before_any_save_a_state_too_large_for_the_grace_is_not_begun(name: str) -> None:
    """A file system is slow to write a part, an object store to complete the object."""
    store = fresh_store()
    faults = slowed(1.2, name)
    world = World(
        2, grace_seconds=4.0, store=store, stores={0: FaultyStore(store, faults), 1: FaultyStore(store, faults)}
    )

    def part(rank: Rank) -> None:
        large = {"p": plain(1.0, count=50_000), "q": plain(1.0, count=50_000)}
        rank.signals.tell()
        for step in range(1, 100):
            rank.run.maybe_save(step, large)

    outcomes = world.play(part)
    ((code, _),) = ends(outcomes)
    assert code == 86
    assert "would take about" in outcomes[0].why  # type: ignore[attr-defined]
    assert faults.met and not list(store.list()), "nothing of the probe stays, and nothing was written"


@pytest.mark.parametrize(("world_size", "saves"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_a_step_after_the_end_of_the_grace_is_not_blamed_on_storage(
    world_size: int, saves: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of an evaluation outlasted the grace, before the first save or after one that has a duration."""
    world = World(world_size, grace_seconds=0.3)

    def part(rank: Rank) -> None:
        for step in range(1, saves + 1):
            rank.run.save(step, state_of(step, rank.size)).wait()
        rank.run.maybe_save(2, state_of(2, rank.size))
        rank.signals.tell()
        time.sleep(0.5)
        rank.train(100, first=3)

    outcomes = world.play(part)
    ((code, _),) = ends(outcomes)
    assert code == 86
    assert "after the grace ended; expected a step within the 0.3 s" in outcomes[0].why  # type: ignore[attr-defined]
    assert "storage" not in caplog.text and "inf" not in caplog.text


def test_a_save_that_takes_longer_than_those_before_it_is_cancelled_in_time() -> None:
    store, released = fresh_store(), threading.Event()
    armed = threading.Event()
    stalled = Faults(lambda _: armed.is_set() and released.wait(2.9), names=("upload.write",), lasting=True)
    world = World(3, grace_seconds=3.0, store=store, stores={1: FaultyStore(store, stalled)})

    def part(rank: Rank) -> float:
        rank.run.save(1, state_of(1, rank.size)).wait()
        if rank.number == 1:
            armed.set()
        start = time.monotonic()
        try:
            rank.train(100_000, told=3 if rank.number == 2 else None, first=2, pause=lambda _: time.sleep(0.001))
        except Preempted:
            assert time.monotonic() - start < 6.0
            raise
        return 0.0

    ((code, step),) = ends(world.play(part))
    assert code == 86 and step >= 3
    assert world.loaded() == (1, 1.0)
    assert [key for key in (entry.key for entry in store.list()) if f"{step:012d}" in key] == []


@pytest.mark.parametrize("saves", (1, 0))
def test_storage_that_hangs_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """The write of a save hangs, or the probe of the speed before the first save."""
    monkeypatch.setattr("holdfast.training.runs.preemption._HUNG_SECONDS", 0.5)
    armed, released = threading.Event(), threading.Event()
    store, ended = fresh_store(), threading.Barrier(2)
    answered: list[FaultPoint] = []

    def hang(operation: FaultPoint) -> None:
        if armed.is_set() and not released.wait(90.0):
            answered.append(operation)

    hung = FaultyStore(store, Faults(hang, names=("upload.write",), lasting=True))
    world = World(2, grace_seconds=3.0, store=store, stores={0: hung})

    def part(rank: Rank) -> None:
        for step in range(1, saves + 1):
            rank.run.save(step, state_of(step, rank.size)).wait()
        armed.set()
        try:
            rank.train(100_000, told=3, first=2)
        finally:
            with suppress(UnavailableError):
                rank.run.close()
            ended.wait(100.0)
            released.set()

    ((code, _),) = ends(world.play(part))
    assert code == 86 and not answered
    assert committed_steps(store) == [*range(1, saves + 1)]


def test_a_save_under_way_of_that_very_step_is_waited_for_and_no_other_begun() -> None:
    world = World(2)

    def part(rank: Rank) -> None:
        rank.run.maybe_save(1, state_of(1, rank.size))
        rank.signals.tell()
        handle = rank.run.save(2, state_of(2, rank.size))
        try:
            rank.run.maybe_save(2, state_of(2, rank.size))
        finally:
            assert handle.committed.done() and handle.failure is None

    assert ends(world.play(part)) == {(85, 2)}
    assert committed_steps(world.store) == [2]


@pytest.mark.parametrize(("told", "code"), [(2, 86), (3, 85), (6, 85)])
def test_after_going_back_the_exit_code_says_whether_a_restart_resumes_the_step(told: int, code: int) -> None:
    world = World(2)

    def part(rank: Rank) -> None:
        # Step 2 is loaded, 6 was saved last and is of another history, 3 is neither.
        for step in (1, 2, 6):
            rank.run.save(step, state_of(step, rank.size)).wait()
        rank.run.maybe_save(7, state_of(7, rank.size))
        state = {"p": plain(0.0, count=3000)}
        assert rank.run.load(state, 2, strict=False) == 2
        rank.signals.tell()
        try:
            for _ in range(10_000):
                rank.run.maybe_save(told, state_of(10 * told, rank.size))
        finally:
            # Step 2 of the chain is not saved again: that failure is in its handle.
            with suppress(ConflictError):
                rank.run.wait()

    outcomes = world.play(part)
    assert ends(outcomes) == {(code, told)}
    # Step 2 is stored, but a restart would resume 6: nothing of the new timeline is committed yet.
    assert world.loaded() == ((6, 6.0) if code == 86 else (told, 10.0 * told))


def test_a_rank_that_is_gone_leaves_the_others_with_what_is_committed() -> None:
    gone = Faults(raise_error(UnavailableError), names=("get_many",), lasting=True)
    world = World(3, grace_seconds=1.5, boards={2: lambda key_value_store: FaultyKeyValueStore(key_value_store, gone)})

    def part(rank: Rank) -> str:
        if rank.number == 2:
            time.sleep(3.5)
            return "gone"
        rank.train(100_000, told=4, pause=lambda _: time.sleep(0.001))
        return "not told"

    *left, dead = world.play(part)
    assert dead == "gone" and {code for code, _ in ends(left)} == {86}
    assert not list(world.store.list())


def test_whoever_is_publishing_when_time_is_up_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is on its way while both ranks cancel their saves, and there before the grace ends."""
    # Late saves are cancelled 3 s after the signal. A busy machine has half a minute to end what is being published.
    for module in ("holdfast.training.coordination.exit.exit_agreement", "holdfast.training.runs.preemption"):
        monkeypatch.setattr(f"{module}.usable_seconds", lambda grace_seconds: grace_seconds - 30.0)
    cancelled, both = threading.Semaphore(0), 2
    real = SaveAttempt.cancel

    def cancel(self: SaveAttempt, error: CheckpointError) -> bool:
        cancelled.release()
        return real(self, error)

    monkeypatch.setattr(SaveAttempt, "cancel", cancel)
    store = fresh_store()

    def stall(operation: FaultPoint) -> None:
        if operation.subject.endswith("000002/manifest.json"):
            assert all(cancelled.acquire(timeout=60.0) for _ in range(both))

    slow = FaultyStore(store, Faults(stall, names=("put_if_absent",), lasting=True))
    world = World(2, grace_seconds=33.0, store=store, stores={0: slow, 1: slow})

    def part(rank: Rank) -> None:
        rank.run.save(1, state_of(1, rank.size)).wait()
        rank.signals.tell()
        rank.run.maybe_save(2, state_of(2, rank.size))

    assert ends(world.play(part)) == {(85, 2)}
    assert world.loaded() == (2, 2.0)


def test_a_loop_that_goes_on_after_its_end_is_told_so_again() -> None:
    world = World(1)

    def part(rank: Rank) -> list[object]:
        rank.signals.tell()
        codes: list[object] = []
        for step in (1, 2):
            with pytest.raises(Preempted) as caught:
                rank.run.maybe_save(step, state_of(step, rank.size))
            codes.append((caught.value.code, caught.value.step))
        return codes

    assert world.play(part) == [[(85, 1), (85, 1)]]
    assert committed_steps(world.store) == [1]


def test_at_a_step_that_was_just_loaded_nothing_is_saved_and_it_is_there() -> None:
    world = World(2)

    def part(rank: Rank) -> None:
        rank.run.maybe_save(1, state_of(1, rank.size))
        rank.run.save(2, state_of(2, rank.size)).wait()
        rank.run.maybe_save(3, state_of(3, rank.size))
        step = rank.run.load(state_of(0, rank.size), strict=False)
        assert step == 2
        rank.signals.tell()
        rank.run.maybe_save(2, state_of(2, rank.size))

    assert ends(world.play(part)) == {(85, 2)}
    assert committed_steps(world.store) == [2]


def test_a_metric_that_no_step_has_yet_does_not_cost_the_last_save() -> None:
    world = World(2, keep=BestN(1, "loss"))
    assert ends(world.play(lambda rank: rank.train(100, told=3))) == {(85, 3)}


def test_what_may_be_stored_already_does_not_count_against_the_grace() -> None:
    store = fresh_store()
    state = {"frozen": plain(1.0, count=300_000), "p": plain(1.0, count=3000)}
    World(1, store=store).play(lambda rank: rank.run.save(1, state).wait())
    # At this speed the frozen part would take 700 s. They pass on this clock alone, whatever else the machine does.
    clock = ClockBySleep()
    faults = Faults(lambda _: clock.sleep(10.0), names=("upload.write",), lasting=True)
    world = World(1, grace_seconds=200.0, store=store, stores={0: FaultyStore(store, faults)}, clock=clock)

    def part(rank: Rank) -> None:
        rank.run.load(state, strict=False)
        rank.run.maybe_save(2, state)
        rank.signals.tell()
        rank.run.maybe_save(3, state)

    assert ends(world.play(part)) == {(85, 3)}


def test_where_ranks_cannot_agree_a_save_under_way_does_not_outlast_the_grace() -> None:
    frozen, thawed = threading.Event(), threading.Event()
    # As a process that was stopped: neither its saves nor its alarm go on.
    faults = Faults(
        lambda _: frozen.is_set() and thawed.wait(30.0),
        names=("upload.write", "put_if_absent", "set", "get_many", "compare_set", "add"),
        lasting=True,
    )
    held = Faults(lambda _: frozen.wait(10.0), names=("upload.write",), lasting=True)
    store = fresh_store()
    world = World(
        2,
        grace_seconds=3.0,
        store=store,
        stores={1: FaultyStore(FaultyStore(store, held), faults)},
        boards={1: lambda key_value_store: FaultyKeyValueStore(key_value_store, faults)},
    )
    seconds: list[float] = []

    def part(rank: Rank) -> None:
        rank.run.maybe_save(1, state_of(1, rank.size))
        rank.run.save(2, state_of(2, rank.size))
        if rank.number == 1:
            frozen.set()
            thawed.wait(30.0)
            return
        frozen.wait(10.0)
        start = time.monotonic()
        try:
            rank.signals.tell()
            rank.run.maybe_save(3, state_of(3, rank.size))
        finally:
            with suppress(UnavailableError):
                rank.run.close()
            seconds.append(time.monotonic() - start)
            thawed.set()

    left, _ = world.play(part)
    assert isinstance(left, Preempted) and left.code == 86
    assert seconds[0] < 10.0, "not as long as it waits for others, which is 20 s"


def test_how_a_job_ended_can_be_made_again_elsewhere() -> None:
    found = copy.copy(Preempted(85, 3, "it is saved"))
    assert (found.code, found.step, found.why) == (85, 3, "it is saved")
