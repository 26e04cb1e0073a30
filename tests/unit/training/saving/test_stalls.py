"""Storage that stops answering: training is held for a bounded time, later saves fail at once, exit does not wait."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.base.clock import SystemClock
from holdfast.core.engine.background import BackgroundQueue, WriteProgress
from holdfast.errors import UnavailableError
from holdfast.policies import LatestN, Policies
from holdfast.settings import KIB, MIB, Settings
from holdfast.stored.repository.epochs import RELEASED, read_heartbeat
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, ThreadGroup
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.support.tuning import tuned
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep
from tests.unit.ranks import PATIENT, World, fresh_store, plain, saved

SMALL_ARENA = replace(PATIENT, arena_bytes_max=3 * PATIENT._tuning.window_bytes, stall_timeout_seconds=1.5)


class Hang:
    """Holds every write from the moment that it is armed."""

    def __init__(self) -> None:
        self.armed, self.over = threading.Event(), threading.Event()

    def __call__(self, operation: FaultPoint) -> None:
        if self.armed.is_set():
            self.over.wait(30.0)


def state(value: float) -> dict[str, object]:
    return {"w": plain(value, count=4096)}


def test_a_write_that_hangs_holds_training_for_the_timeout_and_later_saves_not_at_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hang, store = Hang(), fresh_store()
    faulty = FaultyStore(store, Faults(hang, names={"upload.write"}, lasting=True))
    world = World(2, settings=SMALL_ARENA, store=store, stores={0: faulty})

    def part(rank: int, run: CheckpointManager) -> object:
        saved(run, 1, state(1.0))
        if rank == 0:
            hang.armed.set()
        else:
            hang.armed.wait(10.0)
        handles, held = [], []
        for step in (2, 3, 4):
            start = time.monotonic()
            handles.append(run.save(step, state(float(step))))
            held.append(time.monotonic() - start)
        errors = [handle.failure for handle in handles[1:]] if rank == 0 else []
        hang.armed.clear()
        hang.over.set()
        return held, errors

    with caplog.at_level(logging.WARNING, logger="holdfast"):
        (held, errors), _ = world.play(part)  # type: ignore[misc]
    assert 1.0 < held[1] < 8.0, "the second save waits for memory until the timeout"
    assert held[2] < 1.0, "a later save fails at once"
    assert all(isinstance(error, UnavailableError) for error in errors), errors
    assert "stall_timeout_seconds" in str(errors[0]) and "save of step 2 has written no byte" in str(errors[1])
    assert any("training waits until the state is copied" in each.getMessage() for each in caplog.records)
    assert 1 in world.committed() and 4 not in world.committed()


@pytest.mark.parametrize("cap", (None, 2_000))
def test_a_pack_that_the_cap_holds_back_does_not_hang(cap: int | None) -> None:
    """A pack of 20 KB takes 10 s then, and nothing is written meanwhile: more than the timeout."""
    settings = replace(PATIENT, stall_timeout_seconds=1.5, max_bytes_per_second=cap)
    clock, hung, returned = ClockBySleep(), list[bool](), threading.Event()

    def take_time(_: FaultPoint) -> None:
        assert returned.wait(60), "the state is copied before the call returns, and nobody waits for the pack"
        for seconds in (6.0, 6.0):
            clock.sleep(seconds)
            hung.append(job.progress.hung is not None)

    store = FaultyStore(fresh_store(), Faults(take_time, names={"upload.complete"}))
    store.traits = replace(store.traits, object_bytes_max=MIB, appears_whole=True)
    job = Job(ThreadComm(ThreadGroup(1), 0), clock, settings, NumpyFramework(0))
    with CheckpointManager.over(store, job) as manager:
        handle = manager.save(1, {"w": plain(1.0, count=4096)})
        returned.set()
        handle.wait()
    # It hangs once the timeout is over after the time of the pack, too.
    assert hung == ([False, True] if cap else [True, True])


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that makes large writes hang from the moment that it is set, until the test ends."""
    hung, over, real = threading.Event(), threading.Event(), Syscalls.pwrite

    def pwrite(self: Syscalls, descriptor: int, data: memoryview, offset: int) -> int:
        if hung.is_set() and len(data) > 100_000:
            over.wait(60.0)
        return real(self, descriptor, data, offset)

    monkeypatch.setattr(Syscalls, "pwrite", pwrite)
    yield hung
    over.set()


def test_an_optimizer_step_is_held_no_longer_than_the_timeout(stuck: threading.Event, tmp_path: Path) -> None:
    """A lazy save: its own write hangs, and the fence of the next step waits for its copies."""
    parameter = torch.nn.Parameter(torch.zeros(2 * MIB))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    module = torch.nn.Module()
    module.p = parameter
    settings = tuned(
        Settings(staging="lazy", arena_bytes_max=2 * MIB, deduplicate=False, stall_timeout_seconds=1.5),
        window_bytes=256 * KIB,
    )
    manager = holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings)
    manager.save(1, {"model": module, "optimizer": optimizer}).wait()
    stuck.set()
    handle = manager.save(2, {"model": module, "optimizer": optimizer})
    parameter.grad = torch.ones_like(parameter)
    start = time.monotonic()
    optimizer.step()
    assert 1.0 < time.monotonic() - start < 8.0
    assert isinstance(handle.failure, UnavailableError)
    # A save that had waited would say for how long training waited.
    assert "save of step 3: the save of step 2 has written no byte" in str(manager.save(3, {"model": module}).failure)
    with pytest.raises(UnavailableError):
        manager.close()
    assert time.monotonic() - start < 8.0, "close does not wait for the write"


def test_of_two_lazy_saves_in_flight_only_the_first_waits_for_a_write_that_hangs(
    stuck: threading.Event, tmp_path: Path
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2 * MIB))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    module = torch.nn.Module()
    module.p = parameter
    settings = tuned(
        Settings(staging="lazy", arena_bytes_max=2 * MIB, deduplicate=False, stall_timeout_seconds=4.0),
        window_bytes=256 * KIB,
    )
    manager = holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings)
    stuck.set()
    handles = [manager.save(step, {"model": module, "optimizer": optimizer}) for step in (1, 2)]
    parameter.grad = torch.ones_like(parameter)
    start = time.monotonic()
    optimizer.step()
    assert 3.5 < time.monotonic() - start < 7.0, "the second wait is over at once"
    assert "stall_timeout_seconds" in str(handles[0].failure), handles[0].failure
    assert "save of step 2: the save of step 1 has written no byte" in str(handles[1].failure), handles[1].failure
    with pytest.raises(UnavailableError):
        manager.close()


@pytest.mark.parametrize("is_awaited", (False, True))
def test_a_save_that_writes_in_the_call_is_held_no_longer_than_the_timeout(
    stuck: threading.Event, tmp_path: Path, is_awaited: bool
) -> None:
    settings = Settings(arena_bytes_max=0, stall_timeout_seconds=1.5)
    manager = holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings)
    manager.save(1, {"w": torch.zeros(10)}).wait()
    stuck.set()
    state = {"w": torch.zeros(2 * MIB)}
    if is_awaited:
        with pytest.raises(UnavailableError, match=r"no byte was written meanwhile.*stall_timeout_seconds"):
            holdfast.save(tmp_path / "awaited", state, process_group=False, settings=settings)
    else:
        failure = manager.save(2, state).failure
        assert isinstance(failure, UnavailableError) and "stall_timeout_seconds" in str(failure), failure
        assert "save of step 2 has written no byte" in str(manager.save(3, {"w": torch.zeros(10)}).failure)
        with pytest.raises(UnavailableError):
            manager.close()
    assert manager.steps() == [1]


def test_a_write_in_the_call_that_fails_late_leaves_no_file(tmp_path: Path) -> None:
    """Ctrl-C during the write: the call ends once the write has, and nothing is left of it."""
    store = LocalStore(tmp_path / "run", settings=Settings())
    settings = replace(PATIENT, arena_bytes_max=0)
    writing = threading.Event()

    def interrupt(operation: FaultPoint) -> None:
        if not writing.is_set():
            writing.set()
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)

    job = Job(ThreadComm(ThreadGroup(1), 0), SystemClock(), settings, NumpyFramework(0))
    run = CheckpointManager.over(FaultyStore(store, Faults(interrupt, names={"upload.write"}, lasting=True)), job)
    with pytest.raises(KeyboardInterrupt):
        run.save(1, {"w": plain(1.0, count=100_000)})
    assert writing.is_set()
    assert [entry.key for entry in store.list() if "step-" in entry.key] == []


def test_close_gives_up_a_save_whose_write_hangs(stuck: threading.Event, tmp_path: Path) -> None:
    manager = holdfast.CheckpointManager(
        tmp_path / "run", process_group=False, settings=Settings(stall_timeout_seconds=1.0, arena_bytes_max=32 * MIB)
    )
    manager.save(1, {"w": torch.zeros(10)}).wait()
    stuck.set()
    handle = manager.save(2, {"w": torch.zeros(2 * MIB)})
    start = time.monotonic()
    with pytest.raises(UnavailableError, match="closed while the save of step 2 has written no byte"):
        manager.close()
    assert time.monotonic() - start < 10.0
    assert isinstance(handle.failure, UnavailableError)


def test_close_leaves_a_removal_that_hangs_behind_and_releases_the_run_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, reached, over = fresh_store(), threading.Event(), threading.Event()

    def hang(operation: FaultPoint) -> None:
        if "step-" in operation.subject:
            reached.set()
            over.wait(60.0)

    faulty = FaultyStore(store, Faults(hang, names={"delete"}, lasting=True))
    settings = replace(PATIENT, collect_grace_seconds=0.0)
    run = CheckpointManager.over(
        faulty,
        Job(ThreadComm(ThreadGroup(1), 0), SystemClock(), settings, NumpyFramework(0)),
        policies=Policies(keep=LatestN(1)),
    )
    for step in (1, 2):
        run.save(step, state(float(step))).wait()
    assert reached.wait(20.0)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run.close()
    assert time.monotonic() - start < 15.0
    assert "garbage collection" in caplog.text and "The next collection" in caplog.text, caplog.text
    assert read_heartbeat(store, 1) != RELEASED, "nobody may write while files are being removed"
    over.set()
    end = time.monotonic() + 20.0
    while read_heartbeat(store, 1) != RELEASED and time.monotonic() < end:
        time.sleep(0.05)
    assert read_heartbeat(store, 1) == RELEASED
    assert committed_steps(store) == [2]


EXIT = """
import sys, threading, torch, holdfast
from holdfast.backends.stores.syscalls import Syscalls
real = Syscalls.pwrite
def pwrite(self, descriptor, data, offset):
    if len(data) > 100_000:
        threading.Event().wait(60.0)
    return real(self, descriptor, data, offset)
Syscalls.pwrite = pwrite
settings = holdfast.Settings(stall_timeout_seconds=1.0, arena_bytes_max=1 << 24)
manager = holdfast.CheckpointManager(sys.argv[1], process_group=False, settings=settings, preemption=False)
manager.save(1, {"w": torch.zeros(1 << 20)})
print("leaving", flush=True)
"""


def test_process_exit_does_not_wait_for_a_write_that_hangs(tmp_path: Path) -> None:
    start = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path / "run")], capture_output=True, text=True, timeout=50, check=False
    )
    assert "leaving" in found.stdout, found.stderr
    assert time.monotonic() - start < 45


def test_a_queue_waits_for_slow_work_and_leaves_hung_work_behind() -> None:
    progress = WriteProgress(SystemClock())
    slow, hung, over = BackgroundQueue("slow", progress), BackgroundQueue("hung", progress), threading.Event()
    done = []
    slow.submit(lambda: (time.sleep(0.5), done.append(1)))
    slow.close()
    assert done == [1]

    def hang() -> None:
        with progress.writing("save of step 1", 0.2):
            over.wait(30.0)

    hung.submit(hang)
    start = time.monotonic()
    hung.close()
    assert time.monotonic() - start < 5.0
    over.set()
    with pytest.raises(RuntimeError, match="closed"):
        hung.submit(hang)


def test_the_limit_of_a_hung_write_is_that_of_its_job(stuck: threading.Event, tmp_path: Path) -> None:
    """Saves by path of one group share their threads; another save, with a short limit, comes in between."""
    patient = Settings(arena_bytes_max=32 * MIB, stall_timeout_seconds=60.0)
    hasty = replace(patient, stall_timeout_seconds=0.5)
    small = {"w": torch.zeros(10)}
    holdfast.save(tmp_path / "first", small, process_group=False, settings=patient)
    holdfast.save(tmp_path / "second", small, process_group=False, settings=hasty)
    stuck.set()
    holdfast.async_save(tmp_path / "hung", {"w": torch.zeros(2 * MIB)}, process_group=False, settings=patient)
    time.sleep(1.5)
    handle = holdfast.async_save(tmp_path / "after", small, process_group=False, settings=patient)
    assert handle.failure is None, "the write that hangs has its own limit"


@pytest.mark.parametrize("name", ("holdfast-copy", "holdfast-commit"))
def test_a_thread_that_cannot_be_started_fails_one_save_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, start = [name], threading.Thread.start

    def start_later(self: threading.Thread) -> None:
        if self.name in refused:
            refused.remove(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    settings = Settings(stall_timeout_seconds=20.0)
    with holdfast.CheckpointManager(tmp_path / "run", process_group=False, settings=settings) as manager:
        with pytest.raises(UnavailableError, match="can't start new thread"):
            manager.save(1, {"w": torch.zeros(10)}).wait()
        assert manager.save(2, {"w": torch.zeros(10)}).wait(timeout=30.0) is not None
    assert manager.steps() == [2]


def test_answers_to_other_saves_do_not_hide_a_write_that_hangs() -> None:
    clock = ClockByHand()
    progress = WriteProgress(clock)
    with progress.writing("save of step 1", 10.0):
        for step in range(2, 6):
            assert progress.hung is None
            with progress.asking(f"save of step {step}", 10.0):
                clock.seconds += 3.0
        assert "save of step 1 has written no byte for 12 s" in str(progress.hung)
        progress.note_written()
        assert progress.hung is None
        with progress.asking("save of step 6", 10.0):
            clock.seconds += 11.0
            progress.note_written()
            assert progress.hung is None
    assert progress.hung is None


def test_a_claim_that_nobody_waits_for_stops_new_saves_and_none_in_flight() -> None:
    clock = ClockByHand()
    progress = WriteProgress(clock)
    with progress.writing("save of step 1", 60.0), progress.asking("save of step 2", 60.0):
        progress.give_up("save of step 2")
        clock.seconds += 1.0
        assert progress.hung is None and progress.hung_beside("save of step 1", 60.0) is None
        assert "save of step 2 has written no byte for 1 s" in str(progress.unanswered)
        clock.seconds += 60.0
        assert "save of step 2" in str(progress.hung_beside("save of step 1", 60.0))
    assert progress.unanswered is None


def test_the_short_limit_of_another_job_ends_no_save_of_this_one() -> None:
    clock = ClockByHand()
    progress = WriteProgress(clock)
    with progress.writing("save", 1.0):
        clock.seconds += 2.0
        assert progress.hung is not None
        assert progress.hung_beside("save of step 1", 300.0) is None
        clock.seconds += 300.0
        assert progress.hung_beside("save of step 1", 300.0) is not None


class ClockByHand(SystemClock):
    """A clock that goes as it is told."""

    def __init__(self) -> None:
        self.seconds = 5000.0

    def monotonic_seconds(self) -> float:
        return self.seconds


class Claims:
    """Holds rank 0's look at the location until it is released."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, operation: FaultPoint) -> None:
        self.reached.set()
        self.over.wait(30.0)


def test_a_look_at_the_location_that_hangs_fails_the_save_and_later_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.training.saving.attempt.LATE_SECONDS", 0.5)
    claims, store = Claims(), fresh_store()
    faults = Faults(None, names={"list", "get", "exists", "put_if_absent", "size"}, lasting=True)
    settings = replace(PATIENT, agreement_timeout_seconds=1.0, stall_timeout_seconds=1.0)
    world = World(2, settings=settings, store=store, stores={0: FaultyStore(store, faults)})
    both, resumed = threading.Barrier(2, timeout=20.0), threading.Event()

    def part(rank: int, run: CheckpointManager) -> object:
        first = saved(run, 1, state(1.0))
        both.wait()
        if rank == 0:
            faults._action = claims
        both.wait()
        start = time.monotonic()
        second = run.save(2, state(2.0)).failure
        held = time.monotonic() - start
        both.wait()
        start = time.monotonic()
        third = run.save(3, state(3.0)).failure
        held_again = time.monotonic() - start
        both.wait()
        if rank == 0:
            faults.heal()
            claims.over.set()
            time.sleep(0.5)
            resumed.set()
        assert resumed.wait(20.0)
        return first, second, held, third, held_again, saved(run, 4, state(4.0))

    outcomes = world.play(part)
    assert claims.reached.is_set()
    for _, second, held, third, held_again, _ in outcomes:  # type: ignore[misc]
        assert "the look at memory://" in str(second) and "look at the storage" in str(second), second
        assert isinstance(second, UnavailableError) and held < 3.0, (second, held)
        assert isinstance(third, UnavailableError) and held_again < 1.0, (third, held_again)
    assert world.committed() == [1, 4]


def test_a_signal_is_heard_while_training_waits_for_the_other_ranks() -> None:
    """The wait itself is one call of c10d, in which no Python handler runs."""
    code = """
import signal, sys, tempfile, threading, time, torch, torch.distributed as dist, holdfast, os
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
from holdfast._face.checkpoint_manager import CheckpointManager
from tests.doubles.comm import ThreadComm, ThreadGroup
from holdfast.backends.torch.key_value_store import TorchKeyValueStore
from holdfast.training.coordination.job import Job
from holdfast.base.clock import SystemClock
from tests.doubles.framework import NumpyFramework
from holdfast._face import wiring
class Comm(ThreadComm):
    def all_gather(self, payload): return [payload, payload]
comm = Comm(ThreadGroup(2), 0, TorchKeyValueStore(store))
settings = holdfast.Settings(agreement_timeout_seconds=60.0)
run = CheckpointManager.over(wiring.store_at(tempfile.mkdtemp() + "/run", settings),
                             Job(comm, SystemClock(), settings, NumpyFramework(0)))
threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    run.save(1, {"step": 1})
except KeyboardInterrupt:
    print("heard after", time.monotonic() - start, flush=True)
os._exit(0)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, check=False)
    assert found.stdout.startswith("heard after"), found.stdout + found.stderr
    assert float(found.stdout.split()[-1]) < 15.0
