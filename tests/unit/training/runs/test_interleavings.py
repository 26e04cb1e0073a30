"""Another process acts between any two calls of a save or load: what holds wherever it does so.

A save after the first, and a load, ask their store little: see docs/decisions/072-few-round-trips.md. Each test names
what another process does. It does so before the first call, before the second, and so on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.types.epoch import Epoch
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import manifest_key, step_folder, step_of_pack, superseded_key
from holdfast.errors import CheckpointError, ConflictError, CorruptError, MissingError
from holdfast.policies import LatestN
from holdfast.stored.leases.process import this_process
from holdfast.stored.repository.catalog import read_manifest, read_run_id, step_folders
from holdfast.stored.repository.epochs import accepted_steps, current_fence, newest_epoch, put_accepted, put_epoch
from holdfast.stored.repository.quarantine import identity_at, quarantine
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal.garbage_collection import collected
from tests.doubles.calls import RecordingStore
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.framework import NumpyFramework
from tests.unit.ranks import fresh_store, saved
from tests.unit.stored.leases.test_writer import until
from tests.unit.training.runs.test_round_trips import LONG_LEASES, state

CLOCK = SystemClock()
CALLS_MAX = 60
"""More calls than any save or load here makes."""


@dataclass
class Interruption:
    """Something that another process does just before the n-th call from now."""

    act: Callable[[MemoryStore], object]
    at: int
    store: MemoryStore
    seen: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, name: str, subject: str) -> None:
        with self.lock:  # Calls that are made side by side come one after the other here.
            if len(self.seen) == self.at:
                self.act(self.store)
            self.seen.append((name, subject))

    @property
    def has_happened(self) -> bool:
        return len(self.seen) > self.at


def every_point(
    prepare: Callable[[CheckpointManager], object],
    interrupted: Callable[[CheckpointManager], object],
    act: Callable[[MemoryStore], object],
    acting: type[Interruption] = Interruption,
) -> Iterator[tuple[object, Interruption]]:
    """Yield what the interrupted part returned or raised for each point at which another process acts."""
    for at in range(CALLS_MAX):
        inner = fresh_store()
        interruption = acting(act, at, inner)

        def work(comm: ThreadComm, inner: MemoryStore = inner, interruption: Interruption = interruption) -> object:
            store = RecordingStore(inner)
            run = CheckpointManager.over(store, Job(comm, CLOCK, LONG_LEASES, NumpyFramework(comm.rank)))
            try:
                prepare(run)
                with store.watched(interruption.watch):
                    try:
                        return interrupted(run)
                    except CheckpointError as error:
                        return error
            finally:
                with suppress(CheckpointError):
                    run.close()

        (outcome,) = outcomes_of_ranks(1, work, group=ThreadGroup(1))
        if not interruption.has_happened:
            assert at > 5, "the part makes more calls"
            return
        yield outcome, interruption
    raise AssertionError("more calls than expected")


def take_over(store: MemoryStore) -> None:
    """Begin the next epoch, and accept what is there, in one instant."""
    number, run_id = newest_epoch(store) + 1, read_run_id(store)
    assert run_id is not None
    put_epoch(store, Epoch(number, run_id, this_process(CLOCK, 3600.0)))
    put_accepted(store, number, run_id, accepted_steps(store, current_fence(store), step_folders(store)))


def save_1(run: CheckpointManager) -> None:
    saved(run, 1, state(1.0, frozen=True))


def save_1_and_2(run: CheckpointManager) -> None:
    save_1(run)
    saved(run, 2, state(2.0, frozen=True))


# --------------------------------------------------------------------------------------------------------------- saves


def test_a_save_counts_if_it_says_so_wherever_another_writer_takes_over() -> None:
    kinds = set()

    def save(run: CheckpointManager) -> object:
        outcome = saved(run, 2, state(2.0))
        assert isinstance(saved(run, 3, state(3.0)), ConflictError), "another writer has taken over"
        return outcome

    for outcome, interruption in every_point(save_1, save, take_over):
        counts = 2 in committed_steps(interruption.store)
        kinds.add(type(outcome))
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, ConflictError) or counts, outcome
        else:
            assert counts, interruption.seen
        assert committed_steps(interruption.store)[0] == 1
    assert len(kinds) > 1, kinds


def test_a_writer_whose_heartbeat_has_found_a_newer_epoch_writes_no_more_packs() -> None:
    inner = fresh_store()
    settings = replace(LONG_LEASES, lease_seconds=0.3)

    def work(comm: ThreadComm) -> None:
        store = RecordingStore(inner)
        run = CheckpointManager.over(store, Job(comm, CLOCK, settings, NumpyFramework(comm.rank)))
        save_1(run)
        take_over(inner)
        until(lambda: run._parts.writer_lease.is_lost)
        store.take()
        assert isinstance(saved(run, 2, state(2.0)), ConflictError)
        assert "upload" not in {call.name for call in store.take()}
        run.close()

    assert outcomes_of_ranks(1, work, group=ThreadGroup(1)) == [None]


def test_a_manifest_that_another_process_puts_at_the_step_stays() -> None:
    theirs = b"a manifest of another system"

    def put(store: MemoryStore) -> None:
        with suppress(ConflictError):
            store.put_if_absent(manifest_key(2), theirs)

    for outcome, interruption in every_point(save_1, lambda run: saved(run, 2, state(2.0)), put):
        is_theirs = interruption.store.get(manifest_key(2), MANIFEST_BYTES_MAX) == theirs
        assert is_theirs == isinstance(outcome, ConflictError), (outcome, interruption.seen)


def test_nothing_that_is_suspect_by_the_last_look_is_referred_to() -> None:
    def suspect(store: MemoryStore) -> None:
        quarantine(store, 1, manifest_key(1), identity_at(store, manifest_key(1)), "a test", "today")

    referring, failed = 0, 0
    for prepare, step in ((save_1, 2), (save_1_and_2, 3)):

        def save(run: CheckpointManager, step: int = step) -> object:
            outcome = saved(run, step, state(float(step), frozen=True))
            if isinstance(outcome, BaseException):
                again = saved(run, step + 1, state(9.0, frozen=True))
                assert not isinstance(again, BaseException), again
            return outcome

        for outcome, interruption in every_point(prepare, save, suspect):
            store = interruption.store
            if step not in committed_steps(store):
                assert isinstance(outcome, CorruptError) and "suspect since the save began" in str(outcome)
                failed += 1
                continue
            assert not isinstance(outcome, BaseException)
            refers = any(step_of_pack(pack.name) == 1 for pack in read_manifest(store, step_folder(step)).packs)
            put = interruption.seen.index(("put_if_absent", manifest_key(step)))
            looked = max(n for n, seen in enumerate(interruption.seen[:put]) if seen == ("list", "quarantine/"))
            assert not refers or interruption.at > looked, interruption.seen
            referring += refers
    assert failed and referring


def test_a_step_whose_manifest_was_moved_is_not_saved_twice_on_one_timeline() -> None:
    def move(store: MemoryStore) -> None:
        """What a writer does that was stopped for longer than its lease, and was killed before it put things right."""
        manifest = read_manifest(store, step_folder(1))
        data = store.get(manifest_key(1), MANIFEST_BYTES_MAX)
        store.put(superseded_key(1, manifest.digest), data)
        store.delete([entry.key for entry in store.list(step_folder(1))])

    for outcome, interruption in every_point(save_1_and_2, lambda run: saved(run, 1, state(7.0)), move):
        assert isinstance(outcome, CheckpointError), f"step 1 is there twice: {interruption.seen}"
        assert manifest_key(1) not in [entry.key for entry in interruption.store.list(step_folder(1))]


# --------------------------------------------------------------------------------------------------------------- loads


def save_four(run: CheckpointManager) -> None:
    for step in range(1, 5):
        saved(run, step, state(float(step)))


def loaded(run: CheckpointManager) -> object:
    target = state(0.0)
    step = run.load(target)
    values = np.unique(target["p"].array)
    assert values.size == 1
    return step, float(values[0])


@dataclass
class Prepared:
    """Steps of a job that has ended, and the manifest of the last one, which is not there yet."""

    last: bytes = b""

    def save(self, run: CheckpointManager) -> None:
        """Save, and take the newest manifest away; release the writer lease, as a job does that ends."""
        save_four(run)
        store = run._store
        self.last = store.get(manifest_key(4), MANIFEST_BYTES_MAX)
        store.delete([manifest_key(4)])
        run._parts.writer_lease.release()


def test_a_load_takes_no_step_that_a_former_writer_publishes_late() -> None:
    prepared = Prepared()

    def publish_late(store: MemoryStore) -> None:
        take_over(store)
        store.put(manifest_key(4), prepared.last)

    for outcome, interruption in every_point(prepared.save, loaded, publish_late):
        assert outcome == (3, 3.0), interruption.seen


def test_a_load_takes_a_whole_step_wherever_a_collector_removes_all_but_a_new_one() -> None:
    prepared, taken = Prepared(), set()

    def save_and_collect(store: MemoryStore) -> None:
        store.put(manifest_key(4), prepared.last)
        collected(store, CLOCK, LatestN(1), 0.0, LONG_LEASES.lease_seconds)

    for outcome, interruption in every_point(prepared.save, loaded, save_and_collect):
        assert outcome in ((3, 3.0), (4, 4.0)), (outcome, interruption.seen)
        taken.add(outcome)
    assert len(taken) == 2


def released(run: CheckpointManager) -> None:
    """Save, and release the writer lease, as a job does that ends."""
    save_four(run)
    run._parts.writer_lease.release()


def load_3(run: CheckpointManager) -> object:
    target = state(0.0)
    step = run.load(target, 3)
    return step, float(target["p"].array.flat[0])


def test_a_load_of_a_step_that_is_removed_says_so() -> None:
    def collect(store: MemoryStore) -> None:
        collected(store, CLOCK, LatestN(1), 0.0, LONG_LEASES.lease_seconds)

    outcomes = [outcome for outcome, _ in every_point(released, load_3, collect)]
    assert all(outcome == (3, 3.0) or isinstance(outcome, MissingError) for outcome in outcomes), outcomes
    assert (3, 3.0) in outcomes and outcomes[-1] == (3, 3.0)


@dataclass
class SlowCollector:
    """A collector that has decided what goes, and pauses before it removes the first manifest."""

    decided: threading.Event = field(default_factory=threading.Event)
    may_remove: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def decide(self, inner: MemoryStore) -> None:
        """Carry out a mark, and look for readers; return once the collector is about to remove, or is done."""
        store = RecordingStore(inner)

        def pause(name: str, subject: str) -> None:
            if name == "move":
                self.decided.set()
                assert self.may_remove.wait(20.0)

        def collect() -> None:
            with store.watched(pause):
                collected(store, CLOCK, LatestN(1), 0.0, LONG_LEASES.lease_seconds)
            self.decided.set()

        self.thread = threading.Thread(target=collect, daemon=True)
        self.thread.start()
        assert self.decided.wait(20.0)

    def remove(self) -> None:
        """Go on to the end."""
        self.may_remove.set()
        if self.thread is not None:
            self.thread.join(20.0)
            assert not self.thread.is_alive()


@pytest.mark.parametrize("later", [1, 3, 6])
def test_a_load_of_a_step_is_whole_or_refused_wherever_a_slow_collector_decides_and_removes(later: int) -> None:
    """The collector decides before one call of the load, and removes before a later one."""
    collectors: list[SlowCollector] = []

    class Acting(Interruption):
        def watch(self, name: str, subject: str) -> None:
            with self.lock:
                if len(self.seen) == self.at + later:
                    collectors[-1].remove()
            super().watch(name, subject)

    def decide(store: MemoryStore) -> None:
        collectors.append(SlowCollector())
        collectors[-1].decide(store)

    kinds = set()
    for outcome, _ in every_point(released, load_3, decide, Acting):
        collectors[-1].remove()
        assert outcome == (3, 3.0) or isinstance(outcome, MissingError), outcome
        kinds.add(type(outcome))
    assert kinds == {tuple, MissingError}
