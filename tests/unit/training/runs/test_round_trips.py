"""How often a save, a load and the other calls of a loop ask their store.

A request is a call for which an object store sends something. `sync` and `link` are none: an object store has neither
folders nor links. Packs are not counted, neither their uploads, nor the looks at their sizes, nor their ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import step_folder, step_of_pack
from holdfast.policies import EveryNSteps, LatestN, Policies
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from holdfast.training.runs.tiers.near import NearPlace
from tests.doubles.calls import RecordingStore, StoreCall, rounds, table
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.unit.ranks import PATIENT, fresh_store, plain

LONG_LEASES = replace(PATIENT, lease_seconds=3600.0)
"""No heartbeat is due while a test counts."""

COUNT = 20_000
"""Elements of a tensor: large enough to be compared with the step before."""

FREE = {"upload", "sync", "link", "read_into", "get_cached"}


def requests(calls: Sequence[StoreCall]) -> list[StoreCall]:
    return [call for call in calls if call.name not in FREE and not is_pack_size(call)]


def is_pack_size(call: StoreCall) -> bool:
    return call.name == "size" and step_of_pack(call.subject) is not None


def state(value: float, *, frozen: bool = False) -> dict[str, GlobalTensor]:
    trained = {"p": plain(value, count=COUNT)}
    return {**trained, "frozen": plain(1.0, count=COUNT)} if frozen else trained


@dataclass
class Counted:
    """A run of one rank, and the requests since its last act."""

    run: CheckpointManager
    store: RecordingStore
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, act: str) -> list[StoreCall]:
        calls = self.store.take()
        self.counts[act] = len(requests(calls))
        print(f"\n== {act}: {self.counts[act]} requests\n{table(calls)}")
        return calls

    def save(self, step: int, act: str, saved: dict[str, GlobalTensor]) -> list[StoreCall]:
        """Save a step; note the requests before the call returned, and those of the whole save. Return the former."""
        with background_held(self.store) as let_go:
            handle = self.run.save(step, saved)
            before = self.note(f"{act}, before it returns")
            let_go()
        handle.wait(timeout=25.0)
        self.note(act)
        self.counts[act] += self.counts[f"{act}, before it returns"]
        return before


@contextmanager
def background_held(store: RecordingStore) -> Iterator[Callable[[], None]]:
    """Hold the calls of the commit thread until the block lets them go."""
    may_go = threading.Event()

    def watch(name: str, subject: str) -> None:
        if threading.current_thread().name in ("holdfast-commit", "holdfast-write"):
            assert may_go.wait(20.0), "the save waits for its own background before it returns"

    with store.watched(watch):
        try:
            yield may_go.set
        finally:
            may_go.set()


def played(store: RecordingStore, part: Callable[[Counted], object], *, every: int = 100) -> dict[str, int]:
    """Let a fresh run of one rank play a part; return the counts of its acts."""

    def work(comm: ThreadComm) -> dict[str, int]:
        job = Job(comm, SystemClock(), LONG_LEASES, NumpyFramework(comm.rank))
        run = CheckpointManager.over(store, job, policies=Policies(save=EveryNSteps(every)))
        counted = Counted(run, store)
        counted.note("open")
        part(counted)
        run.wait()
        counted.note("wait")
        run.close()
        counted.note("close")
        return counted.counts

    (counts,) = outcomes_of_ranks(1, work, group=ThreadGroup(1))
    if isinstance(counts, BaseException):
        raise counts
    assert isinstance(counts, dict)
    return counts


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(fresh_store())


def four_steps(counted: Counted) -> None:
    for step, act in enumerate(["first", "second", "third", "fourth"], 1):
        counted.save(step, act, state(float(step)))


def test_a_save_asks_its_store_this_often(store: RecordingStore) -> None:
    counts = played(store, four_steps)
    assert counts["open"] == 1
    assert counts["first, before it returns"] == 16
    assert counts["first"] == 27
    for act in ("second", "third", "fourth"):
        assert (counts[f"{act}, before it returns"], counts[act]) == (1, 12)
    assert counts["wait"] == 0
    assert counts["close"] == 2


def test_a_save_that_refers_to_earlier_steps_looks_at_them_beside_the_step(store: RecordingStore) -> None:
    together = threading.Barrier(3)
    looks = set()

    def meet(name: str, subject: str) -> None:
        if threading.current_thread().name == "holdfast-call" and not may_pass.is_set():
            looks.add((name, subject.partition("/")[0]))
            together.wait(20.0)  # Breaks, and fails the save, unless three calls are under way at once.

    may_pass = threading.Event()

    def refer(counted: Counted) -> None:
        for step, act in ((1, "first"), (2, "second")):
            counted.save(step, act, state(float(step), frozen=True))
        with store.watched(meet), background_held(store) as let_go:
            handle = counted.run.save(3, state(3.0, frozen=True))
            may_pass.set()
            before = counted.note("third, before it returns")
            let_go()
            report = handle.wait(timeout=25.0)
        assert report is not None and report.unchanged_bytes == 4 * COUNT
        assert rounds([call for call in before if call.name != "link"]) == 1

    counts = played(store, refer)
    # A save that finds the first unchanged tensor asks whether the step before is suspect. The next saves expect one.
    assert (counts["second, before it returns"], counts["third, before it returns"]) == (2, 2)
    step_1, step_3 = step_folder(1).rstrip("/"), step_folder(3).rstrip("/")
    assert looks == {("list", step_3), ("list", "quarantine"), ("size", step_1)}


def test_a_second_save_of_several_ranks_asks_once_before_it_returns() -> None:
    inner = fresh_store()
    stores = [RecordingStore(inner) for _ in range(3)]

    def work(comm: ThreadComm) -> list[StoreCall]:
        store = stores[comm.rank]
        run = CheckpointManager.over(store, Job(comm, SystemClock(), LONG_LEASES, NumpyFramework(comm.rank)))
        run.save(1, state(1.0)).wait(timeout=25.0)
        store.take()
        with background_held(store) as let_go:
            handle = run.save(2, state(2.0))
            before = requests(store.take())
            let_go()
        handle.wait(timeout=25.0)
        run.close()
        return before

    before = outcomes_of_ranks(3, work, group=ThreadGroup(3))
    assert [[(call.name, call.subject) for call in calls] for calls in before] == [[("list", step_folder(2))], [], []]


def test_a_load_in_a_fresh_process_with_four_steps_there_asks_this_often(store: RecordingStore) -> None:
    played(store, four_steps)

    def load(counted: Counted) -> None:
        assert counted.run.load(state(0.0)) == 4
        counted.note("load")

    def load_by_number(counted: Counted) -> None:
        assert counted.run.load(state(0.0), 3) == 3
        counted.note("load")

    assert played(store, load)["load"] == 10
    # It reads the newer manifests too: which steps are newer decides whether the next save begins a timeline.
    assert played(store, load_by_number)["load"] == 16


def test_a_first_save_after_a_load_reads_older_manifests_once(store: RecordingStore) -> None:
    played(store, four_steps)
    gets: list[str] = []

    def go_on(counted: Counted) -> None:
        counted.run.load(state(0.0))
        store.take()
        before = counted.save(5, "fifth", state(5.0))
        gets.extend(call.subject for call in before if call.name == "get" and call.subject.endswith("/manifest.json"))

    assert played(store, go_on)["fifth, before it returns"] == 24
    # The list of steps that the new epoch accepts has their digests.
    assert sorted(gets) == [step_folder(step) + "manifest.json" for step in (1, 2, 3, 4, 4, 4)]


def test_a_collection_asks_nothing_that_was_answered(store: RecordingStore) -> None:
    played(store, four_steps)
    collector = CheckpointGC(store, SystemClock(), None, None)
    asked = []
    for _ in range(2):
        store.take()
        collector.survey()
        asked.append([(call.name, call.subject) for call in store.take()])
    first, second = asked
    # Each manifest was read whole, and listed with its size.
    assert [subject for name, subject in first if name == "size"] == ["manifest.json"]
    assert ("size", "manifest.json") not in second and ("get", "holdfast.json") not in second
    # Size and end of the manifest of each step, which is known.
    assert len(second) == len(first) - 2


def test_a_call_that_saves_nothing_asks_nothing(store: RecordingStore) -> None:
    def loop(counted: Counted) -> None:
        counted.run.save(0, state(0.0)).wait()
        counted.note("first")
        for step in range(1, 5):
            assert counted.run.maybe_save(step, state(float(step))) is None
        counted.note("maybe_save")

    assert played(store, loop)["maybe_save"] == 0


DRAINING = {"holdfast-drain", "holdfast-store", "holdfast-copy", "holdfast-collect"}
"""Threads of a drain and of the collection after it: they may end during the next step."""


def test_a_save_near_never_asks_the_root() -> None:
    near, root = RecordingStore(fresh_store()), RecordingStore(fresh_store())

    def is_of_save(call: StoreCall) -> bool:
        return call.thread not in DRAINING and "/reports/drain-" not in call.subject

    def work(comm: ThreadComm) -> dict[int, list[StoreCall]]:
        job = Job(comm, SystemClock(), LONG_LEASES, NumpyFramework(comm.rank))
        place = NearPlace(near, EveryNSteps(1), keep_last=20)
        policies = Policies(save=EveryNSteps(4), keep=LatestN(20))
        run = CheckpointManager.over(root, job, policies=policies, near=place)
        asked = {}
        for step in range(1, 11):
            handle = run.maybe_save(step, state(float(step), frozen=True))
            assert handle is not None
            handle.wait(timeout=25.0)
            asked[step] = [call for call in root.take() if is_of_save(call)]
            print(f"\n== step {step}\n{table(asked[step])}")
        run.close()
        return asked

    (asked,) = outcomes_of_ranks(1, work, group=ThreadGroup(1))
    assert isinstance(asked, dict), asked
    # The first one begins the run, whose epochs the root decides.
    assert len(asked.pop(1)) == 22
    assert not any(asked.values())
