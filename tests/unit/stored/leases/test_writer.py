"""Who may write: taken once, kept by signs of life, lost to whoever sees none, given back at the end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.types.epoch import Epoch, Holder
from holdfast.core.format.names import beat_key, epoch_key
from holdfast.errors import ConflictError, InvalidError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.leases import process as holders
from holdfast.stored.leases import writer as tenures
from holdfast.stored.leases.process import is_gone, is_this_process, this_process
from holdfast.stored.leases.writer import WriterLease, hold_writer_lease
from holdfast.stored.repository.epochs import (
    RELEASED,
    current_fence,
    newest_epoch,
    put_accepted,
    put_epoch,
    put_heartbeat,
    read_epoch,
    read_heartbeat,
    require_newest,
)
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from tests.doubles.faults import Action, FaultPoint, Faults, FaultyStore, raise_error, stall_until

LEASE = 0.3
LONG = 60.0
CLOCK = SystemClock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def tenure_of(store: MemoryStore) -> Iterator[Callable[..., WriterLease]]:
    """Makes tenures that are released after the test."""
    made: list[WriterLease] = []

    def tenure(lease_seconds: float = LONG) -> WriterLease:
        made.append(WriterLease(store, CLOCK, lease_seconds))
        return made[-1]

    yield tenure
    for each in made:
        each.release()


def elsewhere(**change: object) -> Holder:
    """A holder on another machine."""
    return replace(this_process(CLOCK, LEASE), **{"host": "node-9", "boot": "another", "nonce": "9" * 32, **change})


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_taken_at_the_first_need_and_held(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    tenure = tenure_of()
    assert (tenure.epoch, newest_epoch(store)) == (0, 0), "making one takes nothing"
    assert tenure.hold("run") == tenure.hold("run") == 1
    record = read_epoch(store, 1)
    assert record is not None and record.run_id == "run"
    assert (record.holder.pid, record.holder.lease_seconds) == (os.getpid(), LONG)
    assert is_this_process(record.holder)
    assert current_fence(store).epoch == 1


def test_released_it_is_taken_at_once(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    first = tenure_of()
    first.hold("run")
    first.release()
    assert read_heartbeat(store, 1) == RELEASED
    start = time.monotonic()
    assert tenure_of().hold("run") == 2
    assert time.monotonic() - start < 5


def test_signs_of_life_are_given_until_the_end(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    tenure = tenure_of(LEASE)
    tenure.hold("run")
    seen = set[bytes | None]()
    until(lambda: seen.add(read_heartbeat(store, 1)) or len(seen) > 3)  # type: ignore[func-returns-value]
    tenure.release()
    time.sleep(2 * LEASE)
    assert read_heartbeat(store, 1) == RELEASED


def test_two_managers_of_one_process_conflict_at_once(tenure_of: Callable[..., WriterLease]) -> None:
    tenure_of().hold("run")
    start = time.monotonic()
    with pytest.raises(ConflictError, match=rf"process {os.getpid()}, since .*another CheckpointManager of this very"):
        tenure_of().hold("run")
    assert time.monotonic() - start < 5


def test_a_manager_that_was_dropped_holds_nothing(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    dropped = WriterLease(store, CLOCK, LEASE)
    dropped.hold("run")
    del dropped
    gc.collect()
    assert tenure_of().hold("run") == 2
    # And of itself it tells other processes.
    until(lambda: read_heartbeat(store, 1) == RELEASED)


def test_one_that_only_waits_for_the_collector_holds_nothing(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    dropped = WriterLease(store, CLOCK, LONG)
    dropped.hold("run")
    cycle: list[object] = [dropped]
    cycle.append(cycle)
    gc.disable()
    try:
        del dropped, cycle
        assert tenure_of().hold("run") == 2
    finally:
        gc.enable()


def corpse() -> tuple[int, int]:
    """Return id and start of a process that ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stat = holders._stat_of(child.pid)
        assert stat is not None
        child.kill()
        child.wait()
        return child.pid, stat.started


def test_a_holder_whose_process_is_gone_is_not_waited_for(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    pid, started = corpse()
    put_epoch(store, Epoch(1, "run", replace(this_process(CLOCK, LONG), pid=pid, started=started)))
    start = time.monotonic()
    assert tenure_of().hold("run") == 2
    assert time.monotonic() - start < 5


def records_in(store: MemoryStore) -> list[int]:
    """Return the epochs that have a record."""
    stored = {entry.key for entry in store.list("epochs/")}
    return [number for number in range(1, 100) if epoch_key(number) in stored]


def test_records_that_no_writer_looks_for_go(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    for number in range(1, 41):
        lease = tenure_of()
        assert lease.hold("run") == number
        lease.release()
        assert len(list(store.list("epochs/"))) <= 20
    assert records_in(store)[-1] == 40 and len(records_in(store)) <= 11


def test_records_after_a_process_that_is_gone_go_too(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    pid, started = corpse()
    for number in range(1, 31):
        lease = tenure_of()
        assert lease.hold("run") == number
        record = read_epoch(store, number)
        assert record is not None
        dead = replace(record.holder, pid=pid, started=started, nonce="9" * 32)
        store.delete([epoch_key(number)])
        put_epoch(store, replace(record, holder=dead))
        lease.release()
        assert read_heartbeat(store, number) != RELEASED
    assert len(records_in(store)) <= 11


def test_the_record_after_a_writer_that_was_only_silent_stays(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    put_epoch(store, Epoch(1, "run", elsewhere()))
    put_heartbeat(store, 1, b"17\n")
    for number in range(2, 31):
        lease = tenure_of()
        assert lease.hold("run") == number
        lease.release()
    assert 2 in records_in(store) and 3 not in records_in(store)
    with pytest.raises(ConflictError, match=r"epoch 1 is over: epoch 30 "):
        require_newest(store, 1)  # It goes on after 29 others.


def test_a_record_that_does_not_say_how_the_writer_before_ended_stays(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    for number in range(1, 4):  # As versions before wrote them.
        put_epoch(store, Epoch(number, "run", elsewhere()))
        put_accepted(store, number, "run", {})
    put_heartbeat(store, 3, RELEASED)
    for _ in range(30):
        lease = tenure_of()
        lease.hold("run")
        lease.release()
    assert records_in(store)[:3] == [1, 2, 3] and records_in(store)[3] > 20


def test_a_process_that_listed_before_many_others_came_and_went_is_refused(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    lease = tenure_of()
    lease.hold("run")
    lease.release()

    def others_come_and_go(operation: FaultPoint) -> None:
        assert operation.subject == epoch_key(2)
        for _ in range(30):
            other = tenure_of()
            other.hold("run")
            other.release()
        assert 2 not in records_in(store)

    late = WriterLease(FaultyStore(store, Faults(others_come_and_go, names=["put_if_absent"])), CLOCK, LONG)
    with pytest.raises(ConflictError, match="epoch 31 "):
        late.hold("run")
    assert late.epoch == 0 and current_fence(store).epoch == 31
    assert tenure_of().hold("run") == 32


def test_a_process_id_that_another_process_has_now_is_gone() -> None:
    own = this_process(CLOCK, LONG)
    assert not is_gone(own)
    assert is_gone(replace(own, started=own.started + 1))
    assert not is_this_process(replace(own, started=own.started + 1))


def test_a_killed_process_that_nobody_has_waited_for_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = holders._stat_of(child.pid)
    assert stat is not None
    mortal = replace(this_process(CLOCK, LONG), pid=child.pid, started=stat.started)
    assert not is_gone(mortal)
    child.send_signal(signal.SIGSTOP)
    assert not is_gone(mortal), "one that is held may go on"
    child.kill()
    until(lambda: is_gone(mortal))
    assert os.path.exists(f"/proc/{child.pid}"), "it lies there still"
    child.communicate()


@pytest.mark.parametrize(
    "change",
    [{"boot": "another"}, {"namespaces": "another"}, {"boot": ""}, {"pid": 0}, {"host": "a copy"}, {"started": 0}],
)
def test_a_process_that_cannot_be_seen_from_here_is_never_gone(change: dict[str, object]) -> None:
    pid, started = corpse()
    assert not is_gone(replace(this_process(CLOCK, LONG), **{"pid": pid, "started": started, **change}))  # type: ignore[arg-type]


def test_another_host_is_waited_for_and_the_wait_is_told(
    store: MemoryStore, tenure_of: Callable[..., WriterLease], caplog: pytest.LogCaptureFixture
) -> None:
    put_epoch(store, Epoch(1, "run", elsewhere()))
    put_heartbeat(store, 1, b"17\n")
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert tenure_of().hold("run") == 2
    assert time.monotonic() - start >= LEASE, "the lease of whoever holds it counts"
    assert f"waiting up to {LEASE} s" in caplog.text
    assert "host node-9" in caplog.text
    assert "epoch 1 is taken over after" in caplog.text


@pytest.mark.parametrize("before", [None, b"1\n"])
def test_a_sign_of_life_is_a_conflict_that_names_who(
    store: MemoryStore, tenure_of: Callable[..., WriterLease], before: bytes | None
) -> None:
    holder = elsewhere(lease_seconds=LONG, since="2026-05-04T03:02:01+00:00")
    put_epoch(store, Epoch(1, "run", holder))
    if before is not None:
        put_heartbeat(store, 1, before)
    calls = count()

    class Beating:
        """The store as it looks while its holder lives."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def get(self, key: str, bytes_max: int) -> bytes:
            if key == beat_key(1) and next(calls) == 2:
                put_heartbeat(store, 1, b"2\n")
            return store.get(key, bytes_max)

    contender = WriterLease(Beating(), CLOCK, LEASE)  # type: ignore[arg-type]
    expected = rf"epoch 1 \(host node-9, process {os.getpid()}, since 2026-05-04T03:02:01\+00:00\); its heartbeat was"
    with pytest.raises(ConflictError, match=expected):
        contender.hold("run")
    assert newest_epoch(store) == 1
    assert read_heartbeat(store, 1) == b"2\n", "a loser leaves no trace"


def test_a_lost_race_is_a_conflict_and_leaves_the_winner_alone(store: MemoryStore) -> None:
    winner = elsewhere()

    def win(operation: object) -> None:
        put_epoch(store, Epoch(1, "run", winner))
        put_heartbeat(store, 1, b"5\n")

    contender = WriterLease(FaultyStore(store, Faults(win, names={"put_if_absent"})), CLOCK, LEASE)
    with pytest.raises(ConflictError, match=r"host node-9.*it came first"):
        contender.hold("run")
    assert read_heartbeat(store, 1) == b"5\n"
    assert contender.epoch == 0


def test_lost_it_stays_lost(
    store: MemoryStore, tenure_of: Callable[..., WriterLease], caplog: pytest.LogCaptureFixture
) -> None:
    tenure = tenure_of(LEASE)
    tenure.hold("run")
    put_epoch(store, Epoch(2, "run", elsewhere()))
    put_accepted(store, 2, "run", {})
    with pytest.raises(ConflictError, match=r"epoch 1 is over: epoch 2 .*node-9"):
        tenure.hold("run")
    put_heartbeat(store, 2, RELEASED)
    with pytest.raises(ConflictError, match="epoch 1 is over"):
        tenure.require(store)
    until(lambda: "epoch 1 is over" in caplog.text)


class Late:
    """A store that answers the second look for a sign of life so late that the lease is over by then."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self._calls = store, count()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get(self, key: str, bytes_max: int) -> bytes:
        data = self._store.get(key, bytes_max)
        if key == beat_key(1) and next(self._calls) == 1:
            put_heartbeat(self._store, 1, b"2\n")
            time.sleep(2 * LEASE)
        return data


def test_an_answer_that_comes_after_the_lease_is_asked_for_again(store: MemoryStore) -> None:
    put_epoch(store, Epoch(1, "run", elsewhere()))
    put_heartbeat(store, 1, b"1\n")
    with pytest.raises(ConflictError, match="its heartbeat was renewed"):
        WriterLease(Late(store), CLOCK, LEASE).hold("run")  # type: ignore[arg-type]


def test_a_beat_that_is_none_is_watched_like_a_damaged_record(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    put_epoch(store, Epoch(1, "run", elsewhere()))
    store.put(beat_key(1), b"x" * 1000)
    start = time.monotonic()
    assert tenure_of(LEASE).hold("run") == 2
    assert time.monotonic() - start >= LEASE


def test_a_process_without_a_thread_left_holds_nothing_and_the_next_try_does(
    store: MemoryStore, tenure_of: Callable[..., WriterLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tenure = tenure_of()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(UnavailableError, match=r"epoch 1: no thread could be started.*ulimit -u"):
            tenure.hold("run")
    assert read_heartbeat(store, 1) == RELEASED
    assert tenure.hold("run") == 2


def test_storage_that_hangs_holds_up_no_end(
    store: MemoryStore, tenure_of: Callable[..., WriterLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenures, "_RELEASE_SECONDS_MAX", 0.2)
    answers = threading.Event()
    faults = Faults(stall_until(answers), names={"put"}, lasting=True)
    tenure = WriterLease(FaultyStore(store, faults), CLOCK, LEASE)
    tenure.hold("run")
    until(lambda: faults.met == 1)
    start = time.monotonic()
    tenure.release()
    assert time.monotonic() - start < 5
    assert tenure_of().hold("run") == 2, "of this process it is known that it is done"
    answers.set()
    until(lambda: read_heartbeat(store, 1) == RELEASED)


def test_a_run_whose_job_ends_badly_lets_the_next_writer_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(job: Job) -> None:
        raise UnavailableError("the board is gone")

    manager = holdfast.CheckpointManager(str(tmp_path), process_group=False)
    manager.save(1, {"w": np.ones(3)}).wait()
    with monkeypatch.context() as patch:
        patch.setattr(Job, "close", close)
        with pytest.raises(UnavailableError, match="the board is gone"):
            manager.close()
    assert read_heartbeat(LocalStore(str(tmp_path), settings=Settings()), 1) == RELEASED


def test_a_damaged_record_is_watched_like_another_hosts(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    store.put(epoch_key(1), b"garbage")
    start = time.monotonic()
    assert tenure_of(LEASE).hold("run") == 2
    assert time.monotonic() - start >= LEASE


def test_an_epoch_that_failed_halfway_is_released(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    faults = Faults(raise_error(UnavailableError), at=2, names={"put_if_absent"})
    broken = WriterLease(FaultyStore(store, faults), CLOCK, LONG)
    with pytest.raises(UnavailableError):
        broken.hold("run")
    assert (newest_epoch(store), read_heartbeat(store, 1), broken.epoch) == (1, RELEASED, 0)
    assert current_fence(store).epoch == 0
    assert broken.hold("run") == 2
    broken.release()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_manifest_that_may_not_be_read_lets_no_epoch_be_taken_and_counts_afterwards(
    tmp_path: Path, is_link: bool
) -> None:
    for step in (1, 2):
        holdfast.save(str(tmp_path / f"step-{step:012d}"), {"w": np.ones(3)}, process_group=False)
    manifest, aside = tmp_path / "step-000000000002" / "manifest.json", tmp_path / "aside"
    manifest.rename(aside)
    manifest.symlink_to(aside) if is_link else os.mkfifo(manifest)
    store = LocalStore(str(tmp_path), settings=Settings())
    tenure = WriterLease(store, CLOCK, LONG)
    with pytest.raises(InvalidError, match=r"step-000000000002/manifest.json.*Whether step 2 counts is unknown"):
        tenure.hold("run")
    assert (tenure.epoch, read_heartbeat(store, 1)) == (0, RELEASED)
    assert current_fence(store).epoch == 0
    manifest.unlink()
    aside.rename(manifest)
    tenure.hold("run")
    assert committed_steps(store) == [1, 2]
    tenure.release()


def test_a_record_whose_reply_was_lost_with_the_error_is_not_in_the_way(
    store: MemoryStore, tenure_of: Callable[..., WriterLease]
) -> None:
    lost = Faults(raise_error(UnavailableError), names={"put_if_absent"}, after=True)
    with pytest.raises(UnavailableError):
        WriterLease(FaultyStore(store, lost), CLOCK, LONG).hold("run")
    assert newest_epoch(store) == 1
    assert tenure_of().hold("run") == 2


def run_out_of_memory(operation: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("failure", [raise_error(UnavailableError), run_out_of_memory])
def test_signs_of_life_go_on_after_a_store_that_failed(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, failure: Action
) -> None:
    faults = Faults(failure, names={"put"}, lasting=True)
    tenure = WriterLease(FaultyStore(store, faults), CLOCK, LEASE)
    tenure.hold("run")
    until(lambda: faults.met >= 2)
    faults.heal()
    until(lambda: read_heartbeat(store, 1) is not None)
    assert caplog.text.count("the heartbeat could not be written") == 1
    tenure.release()


def test_the_last_epoch_there_can_be_is_refused(store: MemoryStore, tenure_of: Callable[..., WriterLease]) -> None:
    store.put(epoch_key(10**12 - 1), b"")
    store.put(beat_key(10**12 - 1), RELEASED)
    with pytest.raises(InvalidError, match="nobody wrote so many"):
        tenure_of().hold("run")


def test_held_for_a_block(store: MemoryStore) -> None:
    with hold_writer_lease(store, CLOCK, LONG, "run") as tenure:
        assert tenure.epoch == 1
        tenure.require(store)
        with pytest.raises(ConflictError), hold_writer_lease(store, CLOCK, LONG, "run"):
            raise AssertionError("held twice")
    assert read_heartbeat(store, 1) == RELEASED


def test_a_forked_process_neither_holds_nor_releases(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from holdfast.stored.leases.writer import WriterLease\n"
        "from holdfast.base.clock import SystemClock\n"
        "from holdfast.settings import Settings\n"
        "from holdfast.backends.stores.local import LocalStore\n"
        f"store = LocalStore({str(tmp_path)!r}, settings=Settings())\n"
        "tenure = WriterLease(store, SystemClock(), 60.0)\n"
        "tenure.hold('run')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    tenure.release()\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(os.path.exists(store.url + '/epochs/000000000001.beat'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n", "the child released what its parent holds"
    # The parent never closed it: that it ended is enough.
    assert (tmp_path / "epochs" / "000000000001.beat").read_bytes() == RELEASED


class JumpingClock(SystemClock):
    """A wall clock that is set a day forward and back at every look."""

    def __init__(self) -> None:
        self._looks = count()

    def unix_seconds(self) -> float:
        return super().unix_seconds() + (86_400 if next(self._looks) % 2 else -86_400)


def test_the_wall_clock_decides_nothing(store: MemoryStore) -> None:
    clock = JumpingClock()
    first = WriterLease(store, clock, LONG)
    assert first.hold("run") == 1
    with pytest.raises(ConflictError):
        WriterLease(store, clock, LONG).hold("run")
    first.release()
    put_epoch(store, Epoch(2, "run", elsewhere(since="1970-01-01T00:00:00+00:00")))
    start = time.monotonic()
    second = WriterLease(store, clock, LONG)
    assert second.hold("run") == 3
    assert LEASE <= time.monotonic() - start < LEASE + 5
    with suppress(ConflictError):
        first.hold("run")
    second.release()
