"""The end of a run: close deletes what no policy keeps, waits for the grace of that only, and says so."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import holdfast
from holdfast._face import wiring
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.policies import AnyOf, LatestN, Policies, Tagged
from holdfast.settings import Settings
from holdfast.stored.leases.reader import ReaderLease
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.removal import mark_keys
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from holdfast.training.runs.removal import background_collection
from holdfast.training.runs.removal.background_collection import Background
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.doubles.framework import NumpyFramework
from tests.support.tuning import tuned
from tests.unit.ranks import fresh_store, plain
from tests.unit.training.runs.removal.test_background_collection import HungCollector

SMALL = tuned(Settings(chunk_bytes=4096, collect_grace_seconds=0.4), window_bytes=8192)
LONG = replace(SMALL, collect_grace_seconds=30.0)


def manager_at(root: Path, settings: Settings = SMALL, keep_last: int = 2) -> CheckpointManager:
    return CheckpointManager(root, every=1, keep_last=keep_last, process_group=False, settings=settings)


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"step": step}).wait()


def steps_at(root: Path) -> list[int]:
    return committed_steps(LocalStore(root, settings=SMALL))


def marks_at(root: Path) -> list[str]:
    return mark_keys(LocalStore(root, settings=SMALL))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_short_run_ends_with_the_steps_that_it_keeps(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep_last=3) as manager:
        for step in range(1, 8):
            manager.maybe_save(step, {"step": step})
    assert steps_at(tmp_path) == [5, 6, 7]
    assert not marks_at(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_folder(n).rstrip("/") for n in (5, 6, 7)]


def test_only_rank_0_waits_and_a_job_of_ranks_ends_with_the_steps_that_it_keeps() -> None:
    store, group = fresh_store(), ThreadGroup(3)

    def work(comm: ThreadComm) -> float:
        job = Job(comm, SystemClock(), replace(SMALL, collect_grace_seconds=1.0), NumpyFramework(comm.rank))
        run = CheckpointManager.over(store, job, policies=Policies(keep=AnyOf(LatestN(2), Tagged())))
        for step in range(1, 6):
            run.save(step, {"p": plain(float(step)), "step": step}).wait()
        start = time.monotonic()
        run.close()
        return time.monotonic() - start

    seconds = cast(list[float], outcomes_of_ranks(3, work, group=group))
    assert committed_steps(store) == [4, 5]
    assert seconds[0] > 0.5 and max(seconds[1:]) < 0.5, seconds


def test_nothing_due_nothing_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    with manager_at(tmp_path, LONG) as manager:
        save(manager, 1, 2)
    with manager_at(tmp_path, LONG, keep_last=1) as manager:
        manager.load({"step": 0})  # It saves nothing, so it deletes nothing.
    assert time.monotonic() - start < 15
    assert steps_at(tmp_path) == [1, 2]
    assert "close waits" not in caplog.text


def test_the_grace_counts_from_the_mark_and_close_says_that_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with manager_at(tmp_path, replace(SMALL, collect_grace_seconds=3.5), keep_last=1) as manager:
        save(manager, 1, 2)
        until(lambda: bool(marks_at(tmp_path)))
        marked = time.monotonic()
        time.sleep(1.5)
    assert 3.0 < time.monotonic() - marked < 3.5 + 5.0
    assert steps_at(tmp_path) == [2]
    (said,) = [record.getMessage() for record in caplog.records if "close waits" in record.getMessage()]
    assert "steps [1] are deleted" in said and "close(wait=False)" in said and said.startswith(str(tmp_path))
    (collected,) = [text for text in caplog.messages if text.startswith("collected steps [1]: ")]
    assert re.fullmatch(r"collected steps \[1\]: [0-9.]+ KiB freed", collected)


def test_each_mark_waits_for_its_own_grace(tmp_path: Path) -> None:
    with manager_at(tmp_path, replace(SMALL, collect_grace_seconds=3.0), keep_last=1) as manager:
        save(manager, 1, 2)
        until(lambda: len(marks_at(tmp_path)) == 1)
        time.sleep(0.5)
        save(manager, 3)
        until(lambda: len(marks_at(tmp_path)) == 2)
        second = time.monotonic()
        until(lambda: manager.steps() == [2, 3])
        assert time.monotonic() - second < 3.0, "the first mark waits for the second"
        until(lambda: manager.steps() == [3])
        # One after the other they would take twice the grace.
        assert time.monotonic() - second < 4.5


def test_close_without_waiting_leaves_it_to_the_next_job(tmp_path: Path) -> None:
    manager = manager_at(tmp_path, LONG, keep_last=1)
    save(manager, 1, 2, 3)
    start = time.monotonic()
    manager.close(wait=False)
    assert time.monotonic() - start < 10
    assert steps_at(tmp_path) == [1, 2, 3] and not marks_at(tmp_path)
    with manager_at(tmp_path, keep_last=1) as manager:
        manager.load({"step": 0})
        save(manager, 4)
    assert steps_at(tmp_path) == [4]


def test_a_grace_over_a_minute_is_left_to_the_next_job_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    with (
        caplog.at_level(logging.INFO, "holdfast"),
        manager_at(tmp_path, replace(SMALL, collect_grace_seconds=90.0), 1) as manager,
    ):
        save(manager, 1, 2)
    assert time.monotonic() - start < 20
    assert steps_at(tmp_path) == [1, 2]
    assert "steps [1] are left to the next job" in caplog.text


@pytest.mark.parametrize("closes", ["with", "finally"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_nothing_is_waited_for(tmp_path: Path, error: type[BaseException], closes: str) -> None:
    start = time.monotonic()
    with pytest.raises(error):
        if closes == "with":
            with manager_at(tmp_path, LONG, keep_last=1) as manager:
                save(manager, 1, 2)
                raise error
        manager = manager_at(tmp_path, LONG, keep_last=1)
        try:
            save(manager, 1, 2)
            raise error
        finally:
            manager.close()
    assert time.monotonic() - start < 15
    assert steps_at(tmp_path) == [1, 2] and not marks_at(tmp_path)


@pytest.fixture
def handlers_after() -> Iterator[None]:
    """Put the handlers of signals back: after a preemption they stay, because the process is to end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_after")
def test_a_preempted_run_ends_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    manager = manager_at(tmp_path, LONG, keep_last=1)
    with pytest.raises(holdfast.Preempted):
        for step in (1, 2, 3):
            manager.maybe_save(step, {"step": step})
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    manager.close()  # The exception has been handled; the process is to end all the same.
    assert time.monotonic() - start < 15
    assert steps_at(tmp_path) == [1, 2, 3]


def interrupt_soon() -> threading.Timer:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("catches_signals", [False, True])
def test_ctrl_c_ends_the_wait_and_leaves_the_steps_whole(tmp_path: Path, catches_signals: bool) -> None:
    manager = manager_at(tmp_path, LONG, keep_last=1)
    for step in (1, 2):
        handle = manager.maybe_save(step, {"step": step}) if catches_signals else manager.save(step, {"step": step})
        assert handle is not None
        handle.wait()
    start, timer = time.monotonic(), interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    timer.join()
    assert time.monotonic() - start < 15
    # The thread removes its mark and releases the lease by itself.
    until(lambda: not marks_at(tmp_path))
    assert steps_at(tmp_path) == [1, 2]
    with manager_at(tmp_path, replace(SMALL, collect_grace_seconds=0.0), keep_last=1) as manager:
        assert manager.load({"step": 0}) == 2
        save(manager, 3)
    assert steps_at(tmp_path) == [3]


def test_what_is_read_during_close_stays_and_is_not_waited_for(tmp_path: Path) -> None:
    manager = manager_at(tmp_path, replace(SMALL, collect_grace_seconds=2.0), keep_last=1)
    save(manager, 1, 2, 3)
    closing = threading.Thread(target=manager.close)
    closing.start()
    until(lambda: bool(marks_at(tmp_path)))
    lease = ReaderLease(SystemClock(), 10.0)
    store = LocalStore(tmp_path, settings=SMALL)
    lease.begin(wiring.location_at(tmp_path / step_folder(1).rstrip("/"), SMALL), read_manifest(store, step_folder(1)))
    start = time.monotonic()
    closing.join(60)
    assert time.monotonic() - start < 10
    assert steps_at(tmp_path) == [1, 3]
    lease.close()


def test_a_failed_save_is_raised_after_the_steps_are_deleted(tmp_path: Path) -> None:
    manager = manager_at(tmp_path, keep_last=1)
    save(manager, 1, 2)
    manager.save(2, {"step": 2})  # It exists.
    with pytest.raises(CheckpointError, match="already there"):
        manager.close()
    assert steps_at(tmp_path) == [2]


def test_storage_that_hangs_gets_its_few_seconds_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_collection, "_END_SECONDS", 0.5)
    collector, released = HungCollector(), threading.Event()
    collecting = Background(cast(CheckpointGC, collector), 30.0, SystemClock())
    collecting.want()
    assert collector.has_begun.wait(60)
    start = time.monotonic()
    collecting.close(released.set, lambda: True)
    assert 0.4 < time.monotonic() - start < 10
    assert not released.is_set()
    collector.may_end.set()
    assert released.wait(60)


def run_over(store: Store, settings: Settings) -> CheckpointManager:
    job = Job(ThreadComm(ThreadGroup(1), 0), SystemClock(), settings, NumpyFramework(0))
    return CheckpointManager.over(store, job, policies=Policies(keep=LatestN(1)))


def no_room(text: str) -> UnavailableError:
    return UnavailableError(f"{text}: ENOSPC (No space left on device)")


def test_a_mark_that_finds_no_room_twice_over_takes_the_place_of_its_announcement() -> None:
    """Replacing an object takes room for both: a disk that is full has it only once the old one is gone."""
    store = fresh_store()

    def refuse(operation: FaultPoint) -> None:
        if operation.subject.startswith("collecting/") and mark_keys(store):
            raise no_room(operation.subject)

    with run_over(FaultyStore(store, Faults(refuse, names={"put"}, lasting=True)), SMALL) as run:
        for step in (1, 2):
            run.save(step, {"step": step}).wait()
    assert committed_steps(store) == [2]


def test_a_removal_that_failed_is_tried_again_without_another_grace(caplog: pytest.LogCaptureFixture) -> None:
    store, faults = fresh_store(), Faults(None, names={"move"}, lasting=True)
    run = run_over(FaultyStore(store, faults), replace(SMALL, collect_grace_seconds=2.0))
    faults._action = raise_error(no_room)
    for step in (1, 2):
        run.save(step, {"step": step}).wait()
    until(lambda: "nothing was collected" in caplog.text)
    faults.heal()
    # No commit comes: a save that finds no room has it tried again.
    start = time.monotonic()
    assert run._parts.collecting is not None
    run._parts.collecting.want_room()
    until(lambda: committed_steps(store) == [2])
    assert time.monotonic() - start < 1.5
    run.close()
