"""The drain of several ranks: who copies what, and how the handles of all ranks end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.events import RankReport
from holdfast.errors import ConflictError, CorruptError, UnavailableError
from holdfast.policies import EveryNSteps, KeepPolicy, LatestN, Policies
from holdfast.stored.copying.step_drain import StepDrain
from holdfast.stored.repository.reports import reports_in
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from holdfast.training.runs.tiers import drain as draining
from holdfast.training.runs.tiers import drain_try as trying
from holdfast.training.runs.tiers.near import NearPlace
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.telemetry.trace import trace_of
from tests.doubles.calls import RecordingStore
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.unit.ranks import PATIENT, fresh_store, plain, sharded

SETTINGS = replace(PATIENT, collect_grace_seconds=0.0)
LIMIT_SECONDS = 15.0
"""Less than the time after which rank 0 copies for others."""


@dataclass
class Places:
    """The two places of a run, and what each rank asks of the root."""

    near: Store = field(default_factory=fresh_store)
    root: Store = field(default_factory=fresh_store)
    seen: list[RecordingStore] = field(default_factory=list)

    def play(
        self,
        size: int,
        part: Callable[[int, CheckpointManager], object],
        *,
        is_memory: bool = False,
        keep: KeepPolicy | None = None,
    ) -> list[object]:
        """Return what each rank's part returned; managers are closed, with a wait for the drain."""
        self.seen = [RecordingStore(self.root) for _ in range(size)]
        policies = Policies(save=EveryNSteps(10), keep=keep or LatestN(20))

        def work(comm: ThreadComm) -> object:
            job = Job(comm, SystemClock(), SETTINGS, NumpyFramework(comm.rank))
            place = NearPlace(self.near, EveryNSteps(5), keep_last=2, is_memory=is_memory)
            with CheckpointManager.over(self.seen[comm.rank], job, policies=policies, near=place) as manager:
                return part(comm.rank, manager)

        outcomes = outcomes_of_ranks(size, work, group=ThreadGroup(size))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def uploads(self) -> list[int]:
        """Return how many files each rank has copied; together they have copied each file once."""
        moved = [[call.subject for call in each.take() if call.name == "move"] for each in self.seen]
        counts = [len([key for key in keys if key.startswith("copying/")]) for keys in moved]
        keys = [entry.key for entry in self.root.list("") if entry.key.startswith("step-")]
        assert sum(counts) == sum("reports/" not in key and not key.endswith("/manifest.json") for key in keys)
        return counts


def state(size: int, value: int = 0) -> dict[str, object]:
    return {"weights": sharded(size, rows=3000 * size), "small": plain(float(value))}


def saved(manager: CheckpointManager, size: int, *steps: int) -> list[SaveHandle]:
    handles = []
    for step in steps:
        handle = manager.maybe_save(step, state(size, step))
        assert handle is not None
        handle.wait("near", LIMIT_SECONDS)
        handles.append(handle)
    return handles


def root_away(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every drain fail until the returned event is set."""
    is_back, lacking = threading.Event(), StepDrain.lacking

    def fail_while_away(drain: StepDrain) -> object:
        if not is_back.is_set():
            raise UnavailableError("the root is away")
        return lacking(drain)

    monkeypatch.setattr(StepDrain, "lacking", fail_while_away)
    monkeypatch.setattr(draining, "_RETRY_SECONDS", 0.1)
    return is_back


def test_every_rank_copies_its_share_and_ends_its_handles() -> None:
    places = Places()

    def train(rank: int, manager: CheckpointManager) -> None:
        for handle in saved(manager, 3, 10, 20):
            handle.wait("committed", LIMIT_SECONDS)

    places.play(3, train)
    assert committed_steps(places.root) == [10, 20]
    assert all(places.uploads())


def test_the_other_ranks_ask_soon_after_a_save_and_after_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_TELL_SECONDS", 60.0)
    places = Places()
    places.play(2, lambda rank, manager: saved(manager, 2, 10)[0].wait("committed", LIMIT_SECONDS))
    assert all(places.uploads())


def test_every_rank_copies_its_share_of_what_an_earlier_job_left(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()

    def leave(rank: int, manager: CheckpointManager) -> None:
        saved(manager, 3, 10, 20)
        manager.close(wait=False)

    with monkeypatch.context() as dead:
        dead.setattr(draining.Drain, "_wake_up", lambda self: None)
        places.play(3, leave)
    assert committed_steps(places.root) == []

    def go_on(rank: int, manager: CheckpointManager) -> None:
        manager.load(state(3))
        saved(manager, 3, 25)

    start = time.monotonic()
    places.play(3, go_on)
    assert committed_steps(places.root) == [10, 20, 25]
    assert all(places.uploads())
    assert time.monotonic() - start < LIMIT_SECONDS


def test_a_handle_ends_although_the_drain_is_quicker_than_the_end_of_the_save() -> None:
    places = Places()
    places.near = near = RecordingStore(places.near)

    def hold(name: str, subject: str) -> None:
        deadline = time.monotonic() + 5.0
        while name == "put" and "/reports/" in subject and time.monotonic() < deadline:
            if committed_steps(places.root):
                time.sleep(0.2)
                return
            time.sleep(0.01)

    def train(rank: int, manager: CheckpointManager) -> None:
        (handle,) = saved(manager, 1, 10)
        handle.wait("committed", LIMIT_SECONDS)

    with near.watched(hold):
        places.play(1, train)


def test_a_rank_whose_drain_is_dead_is_copied_for(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()
    monkeypatch.setattr(trying, "_SILENT_SECONDS", 0.5)
    copy_shares = draining.Drain._copy_shares

    def die(drain: draining.Drain) -> None:
        if drain._job.comm.rank != 1:
            copy_shares(drain)

    monkeypatch.setattr(draining.Drain, "_copy_shares", die)

    def train(rank: int, manager: CheckpointManager) -> None:
        (handle,) = saved(manager, 3, 10)
        if rank != 1:
            handle.wait("committed", LIMIT_SECONDS)
        manager.close(wait=rank != 1)

    places.play(3, train)
    counts = places.uploads()
    assert committed_steps(places.root) == [10] and counts[1] == 0 and counts[0] > counts[2] > 0


def test_a_step_that_is_damaged_near_holds_no_later_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()
    is_back = root_away(monkeypatch)
    monkeypatch.setattr(trying, "_SILENT_SECONDS", 0.5)

    def train(rank: int, manager: CheckpointManager) -> None:
        first, second = saved(manager, 2, 10, 20)
        if rank == 0:
            (pack,) = [e.key for e in places.near.list("step-000000000010/") if e.key.endswith("r00000.safetensors")]
            data = bytearray(places.near.get(pack, 1 << 24))
            data[-10] ^= 1
            places.near.put(pack, bytes(data))
            is_back.set()
        with pytest.raises((CorruptError, UnavailableError), match="step 10"):
            first.wait("committed", LIMIT_SECONDS)
        second.wait("committed", LIMIT_SECONDS)

    places.play(2, train)
    assert committed_steps(places.root) == [20]


def test_an_emptied_near_tier_fails_no_handle() -> None:
    places = Places()

    def train(rank: int, manager: CheckpointManager) -> object:
        (handle,) = saved(manager, 2, 10)
        manager.close()
        return handle.committed.exception(LIMIT_SECONDS)

    assert places.play(2, train, is_memory=True) == [None, None]
    assert places.near.folders() == ["epochs"] and committed_steps(places.root) == [10]


def test_a_step_that_the_root_refuses_holds_no_later_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    places, publish = Places(), StepDrain.publish

    def refuse(drain: StepDrain, epoch: int) -> object:
        if any(file.key.startswith("step-000000000010/") for file in drain.files):
            raise ConflictError("two manifests of step 10 count")
        return publish(drain, epoch)

    monkeypatch.setattr(StepDrain, "publish", refuse)

    def train(rank: int, manager: CheckpointManager) -> None:
        first, later = saved(manager, 1, 10, 20)
        with pytest.raises(ConflictError, match="two manifests of step 10"):
            first.wait("committed", LIMIT_SECONDS)
        later.wait("committed", LIMIT_SECONDS)

    places.play(1, train)


def test_a_step_that_training_left_while_it_waited_holds_no_later_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()
    is_back = root_away(monkeypatch)

    def train(rank: int, manager: CheckpointManager) -> None:
        saved(manager, 1, 10, 20)
        assert manager.load(state(1), step=10) == 10
        (again,) = saved(manager, 1, 20)
        is_back.set()
        again.wait("committed", LIMIT_SECONDS)
        (later,) = saved(manager, 1, 30)
        later.wait("committed", LIMIT_SECONDS)
        assert manager.load(state(1)) == 30

    places.play(1, train)
    assert {10, 20, 30} <= {*committed_steps(places.root)}


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_saves_go_on_while_the_root_is_away(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_RETRY_SECONDS", 0.1)
    is_away, is_back = threading.Event(), threading.Event()

    def meet(operation: FaultPoint) -> None:
        if is_away.is_set() and how == "hangs":
            is_back.wait(30.0)
        elif is_away.is_set() and not is_back.is_set():
            raise UnavailableError("the root is away")

    places = Places()
    bare, places.root = places.root, FaultyStore(places.root, Faults(meet, lasting=True))

    def train(rank: int, manager: CheckpointManager) -> None:
        saved(manager, 2, 5)
        is_away.set()
        start = time.monotonic()
        handles = saved(manager, 2, *range(10, 260, 5))
        assert time.monotonic() - start < LIMIT_SECONDS
        due = [handle for handle, step in zip(handles, range(10, 260, 5), strict=True) if step % 10 == 0]
        assert not any(handle.committed.done() and handle.committed.exception() is None for handle in due)
        is_back.set()
        for handle in due[-2:]:
            handle.wait("committed", LIMIT_SECONDS)
        with pytest.raises(UnavailableError, match="would not keep"):
            due[1].wait("committed", LIMIT_SECONDS)

    places.play(2, train, keep=LatestN(2))
    assert committed_steps(bare)[-2:] == [250, 255]
    assert len(committed_steps(places.near)) <= 4


def test_the_root_has_a_report_of_each_rank_on_the_drain() -> None:
    places = Places()

    def train(rank: int, manager: CheckpointManager) -> None:
        (handle,) = saved(manager, 2, 10)
        handle.wait("committed", LIMIT_SECONDS)

    places.play(2, train)
    trace = trace_of(places.root)
    assert (trace.saves, trace.loads, trace.drains, trace.ranks) == (1, 0, 1, 2)
    sent = [each for _, each in reports_in(places.root, "step-000000000010/", "drain-")]
    assert [each.operation.rank for each in sent if isinstance(each, RankReport)] == [0, 1]
    assert all(isinstance(each, RankReport) and each.bytes and each.facts["files"] for each in sent)
