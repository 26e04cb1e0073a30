"""One lease and one claim with several callers in the process: they wait for the first, and share what it takes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import shared_job
from holdfast.backends.alone import AloneComm
from holdfast.backends.stores.local import LocalStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Epoch
from holdfast.errors import CheckpointError, ConflictError, UnavailableError
from holdfast.settings import Settings
from holdfast.stored.leases.path_claim import release_path_claim, take_path_claim
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.epochs import newest_epoch, put_epoch, put_heartbeat
from holdfast.stored.repository.overwriting import claim_of, put_claim, read_claim
from holdfast.training.coordination.job import Job
from holdfast.training.saving.save import save_and_wait
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.doubles.framework import NumpyFramework
from tests.support.between_calls import every_gap
from tests.support.overwritten_checkpoint import HASTY, job_of, number_at, request, state_of
from tests.unit.ranks import fresh_store
from tests.unit.stored.leases.test_writer import elsewhere, until

CLOCK = SystemClock()
LONG = 60.0
CALLERS = 5


class Gate:
    """Holds the first call of one method for one key until it is opened."""

    def __init__(self, store: Store, name: str, part: str, *, after: bool = False) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.action: Callable[[], object] = lambda: None

        def stop(point: FaultPoint) -> None:
            if part in point.subject and not self.reached.is_set():
                self.reached.set()
                self.action()
                assert self.opened.wait(LONG)

        self.store = FaultyStore(store, Faults(stop, names={name}, lasting=True, after=after))


def interrupt() -> None:
    """Press Ctrl-C: the main thread stops to wait."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CALLERS + 1) as pool:
        yield pool


def outcome_of(future: Future[object]) -> object:
    error = future.exception(LONG)
    return future.result() if error is None else error


# ------------------------------------------------------------------------------------------------- the writer lease


@pytest.mark.parametrize(("name", "part"), [("list", "epochs/"), ("put_if_absent", "1.json"), ("put_if_absent", "acc")])
def test_callers_beside_the_first_share_its_epoch(threads: ThreadPoolExecutor, name: str, part: str) -> None:
    gate = Gate(fresh_store(), name, part)
    lease = WriterLease(gate.store, CLOCK, LONG)
    calls = [threads.submit(lease.hold, "run")]
    assert gate.reached.wait(LONG)
    calls += [threads.submit(lease.hold, "run") for _ in range(CALLERS)]
    gate.opened.set()
    assert [call.result(LONG) for call in calls] == [1] * (CALLERS + 1)
    assert newest_epoch(gate.store) == lease.epoch == 1
    lease.release()


def test_the_next_caller_tries_if_the_first_fails(threads: ThreadPoolExecutor) -> None:
    gate = Gate(fresh_store(), "put_if_absent", "accepted")

    def fail() -> None:
        assert gate.opened.wait(LONG)
        raise UnavailableError("storage did not answer once")

    gate.action = fail
    lease = WriterLease(gate.store, CLOCK, LONG)
    first = threads.submit(lease.hold, "run")
    assert gate.reached.wait(LONG)
    second = threads.submit(lease.hold, "run")
    gate.opened.set()
    assert isinstance(first.exception(LONG), UnavailableError)
    assert second.result(LONG) == lease.epoch == 2
    lease.release()


def test_every_caller_learns_of_another_job(threads: ThreadPoolExecutor) -> None:
    store = fresh_store()
    put_epoch(store, Epoch(1, "run", elsewhere(lease_seconds=2.0)))
    gate = Gate(store, "get", "1.beat")
    lease = WriterLease(gate.store, CLOCK, LONG)
    calls = [threads.submit(lease.hold, "run") for _ in range(2)]
    assert gate.reached.wait(LONG)
    gate.opened.set()
    beats = 0
    while not all(call.done() for call in calls):
        beats += 1
        put_heartbeat(store, 1, b"%d\n" % beats)
    for call in calls:
        assert isinstance(call.exception(), ConflictError) and "host node-9" in str(call.exception())
    assert newest_epoch(store) == 1


def test_a_lease_released_while_it_is_taken_is_given_up_at_every_point() -> None:
    """As by a close after Ctrl-C: the next manager of the process takes the run at once."""
    leases, over = list[tuple[WriterLease, WriterLease]](), threading.Event()

    def hold(store: Store) -> object:
        leases.append((WriterLease(store, CLOCK, LONG), WriterLease(fresh_store(), CLOCK, LONG)))
        return leases[-1][0].hold("run")

    def close_and_begin(store: Store) -> None:
        closed, _ = leases[-1]
        if over.is_set():
            return
        closed.release()
        leases[-1] = closed, WriterLease(store, CLOCK, LONG)
        leases[-1][1].hold("run")

    for gap in every_gap(fresh_store, hold, close_and_begin):
        closed, begun = leases[-1]
        assert isinstance(gap.outcome, UnavailableError | ConflictError), gap
        assert closed.epoch == 0
        number = begun.epoch
        assert number in (1, 2) and begun.hold("run") == newest_epoch(gap.store) == number
        begun.release()
        assert WriterLease(gap.store, CLOCK, LONG).hold("run") == number + 1
    over.set()
    leases[-1][0].release()


def test_a_lease_that_was_released_may_be_taken_again(threads: ThreadPoolExecutor) -> None:
    gate = Gate(fresh_store(), "put_if_absent", "accepted", after=True)
    lease = WriterLease(gate.store, CLOCK, LONG)
    first = threads.submit(lease.hold, "run")
    assert gate.reached.wait(LONG)
    lease.release()
    second = threads.submit(lease.hold, "run")
    gate.opened.set()
    assert "released while it was being taken" in str(first.exception(LONG))
    assert second.result(LONG) == lease.epoch == 2
    lease.release()


@pytest.mark.parametrize("change", ["another epoch", "another epoch, released"])
def test_a_lease_beside_another_job_at_every_point(change: str) -> None:
    """The other one prevails, or this one takes the epoch after that: never a third outcome."""

    def begin(store: Store) -> None:
        number = newest_epoch(store) + 1
        put_epoch(store, Epoch(number, "run", elsewhere(lease_seconds=0.02)))
        if "released" in change:
            put_heartbeat(store, number, b"released\n")

    leases = list[WriterLease]()

    def hold(store: Store) -> object:
        leases.append(WriterLease(store, CLOCK, LONG))
        return leases[-1].hold("run")

    for gap in every_gap(fresh_store, hold, begin):
        if isinstance(gap.outcome, int):
            leases[-1].release()
        else:
            assert isinstance(gap.outcome, ConflictError) and "node-9" in str(gap.outcome), gap


# ------------------------------------------------------------------------------------------------------ path claims


@pytest.mark.parametrize(("name", "part"), [("put_if_absent", "claim"), ("list", "overwriting/")])
def test_saves_of_one_job_wait_for_its_claim(threads: ThreadPoolExecutor, name: str, part: str) -> None:
    inner = fresh_store()
    gate = Gate(inner, name, part)
    calls = [threads.submit(take_path_claim, gate.store, CLOCK, LONG, "a job")]
    assert gate.reached.wait(LONG)
    calls += [threads.submit(take_path_claim, gate.store, CLOCK, LONG, "a job") for _ in range(CALLERS)]
    gate.opened.set()
    claims = {call.result(LONG) for call in calls}
    (claim,) = claims
    found = read_claim(inner)
    assert found is not None and found.holder == claim.holder
    for _ in range(CALLERS):
        release_path_claim(claim)
    assert read_claim(inner) is not None
    release_path_claim(claim)
    assert read_claim(inner) is None
    # The job may claim it anew, and so may another one.
    for owner in ("a job", "another job"):
        release_path_claim(take_path_claim(inner, CLOCK, LONG, owner))


def test_the_next_save_claims_if_the_first_fails(threads: ThreadPoolExecutor) -> None:
    inner = fresh_store()
    gate = Gate(inner, "list", "overwriting/")

    def fail() -> None:
        assert gate.opened.wait(LONG)
        raise UnavailableError("storage did not answer once")

    gate.action = fail
    first = threads.submit(take_path_claim, gate.store, CLOCK, LONG, "a job")
    assert gate.reached.wait(LONG)
    second = threads.submit(take_path_claim, gate.store, CLOCK, LONG, "a job")
    gate.opened.set()
    assert isinstance(first.exception(LONG), UnavailableError)
    release_path_claim(second.result(LONG))
    assert [entry.key for entry in inner.list()] == []


def test_a_claim_is_refused_beside_a_living_one_whoever_waits(threads: ThreadPoolExecutor) -> None:
    store = fresh_store()
    assert put_claim(store, claim_of(elsewhere(lease_seconds=2.0)))
    calls = [threads.submit(take_path_claim, store, CLOCK, LONG, "a job") for _ in range(2)]
    beats = 0
    while not all(call.done() for call in calls):
        beats += 1
        store.put(f"overwriting/{'9' * 32}.beat", b"%d\n" % beats)
    for call in calls:
        assert isinstance(call.exception(), ConflictError) and "host node-9" in str(call.exception())


# ----------------------------------------------------------------------------------------------------- whole saves


def manager_at(store: Store, settings: Settings = HASTY) -> CheckpointManager:
    return CheckpointManager.over(store, Job(AloneComm(), CLOCK, settings, NumpyFramework(0)))


@pytest.mark.parametrize("is_local", [True, False])
def test_several_threads_save_with_one_manager(threads: ThreadPoolExecutor, tmp_path: Path, is_local: bool) -> None:
    manager = manager_at(LocalStore(tmp_path / "run", settings=HASTY) if is_local else fresh_store())
    start = threading.Barrier(3)

    def work(first: int) -> list[object]:
        start.wait(LONG)
        handles = [manager.save(step, state_of(step)) for step in range(first, 12, 3)]
        return [handle.wait(timeout=LONG) for handle in handles]

    calls = [threads.submit(work, first) for first in range(3)]
    for call in calls:
        assert None not in call.result(LONG)
    manager.close()
    assert manager.steps() == list(range(12))
    url = manager._store.url
    for step in (0, 5, 11):
        checkpoint = holdfast.open_checkpoint(url, step=step)
        assert list(checkpoint.verify()) == [] and checkpoint.objects["number"] == step
    assert newest_epoch(manager._store) == 1, "one lease served all"


def test_threads_that_save_by_path_share_one_job(threads: ThreadPoolExecutor) -> None:
    """A job each would be two that overwrite one path."""
    start = threading.Barrier(CALLERS)

    def first_save(settings: Settings) -> Job:
        start.wait(LONG)
        return shared_job(False, settings)

    for trial in range(6):
        settings = Settings(lease_seconds=20.0 + trial)
        calls = [threads.submit(first_save, settings) for _ in range(CALLERS)]
        assert len({call.result(LONG) for call in calls}) == 1, trial


@pytest.mark.parametrize("trial", range(2))
def test_two_threads_overwrite_one_path(threads: ThreadPoolExecutor, tmp_path: Path, trial: int) -> None:
    best, job = tmp_path / "best", job_of()
    start = threading.Barrier(2)

    def work(first: int) -> None:
        start.wait(LONG)
        for number in range(first, 6, 2):
            save_and_wait(job, *request(job, best, state_of(number)))

    for call in [threads.submit(work, first) for first in range(2)]:
        call.result(LONG)
    job.close()
    assert number_at(best) in (4, 5)
    assert read_claim(LocalStore(best, settings=HASTY)) is None


@pytest.mark.parametrize(("name", "part"), [("put_if_absent", "accepted"), ("list", "epochs/"), ("get", "holdfast")])
def test_the_save_after_an_interrupt_shares_the_lease(name: str, part: str) -> None:
    """Ctrl-C in a notebook, while the first look at storage is slow. That look goes on on its own thread."""
    gate = Gate(fresh_store(), name, part)
    gate.action = interrupt
    manager = manager_at(gate.store)
    with pytest.raises(KeyboardInterrupt):
        manager.save(1, state_of(1))
    opener = threading.Timer(0.1, gate.opened.set)
    opener.start()
    assert manager.save(2, state_of(2)).wait(timeout=LONG) is not None
    opener.join()
    with suppress(CheckpointError):
        manager.close()
    assert manager.steps() == [2] and newest_epoch(gate.store) == 1


def test_a_manager_made_after_an_interrupt_and_a_close_takes_the_run() -> None:
    inner = fresh_store()
    gate = Gate(inner, "put_if_absent", "accepted")
    gate.action = interrupt
    manager = manager_at(gate.store)
    with pytest.raises(KeyboardInterrupt):
        manager.save(1, state_of(1))
    with suppress(CheckpointError):
        manager.close()
    later = manager_at(inner)
    assert later.save(2, state_of(2)).wait(timeout=LONG) is not None
    gate.opened.set()
    until(lambda: newest_epoch(inner) == 2 and manager._parts.writer_lease.epoch == 0)
    assert later.save(3, state_of(3)).wait(timeout=LONG) is not None
    later.close()
    assert later.steps() == [2, 3]


def test_a_save_that_waits_for_a_slow_one_gives_up_in_time() -> None:
    settings = Settings(agreement_timeout_seconds=0.2, lease_seconds=LONG)
    gate = Gate(fresh_store(), "put_if_absent", "accepted")
    manager = manager_at(gate.store, settings)
    first = manager.save(1, state_of(1))
    second = manager.save(2, state_of(2))
    assert isinstance(first.failure, UnavailableError) and isinstance(second.failure, UnavailableError)
    gate.opened.set()
    until(lambda: manager._parts.writer_lease.epoch == 1 and manager._job.progress.unanswered is None)
    assert manager.save(3, state_of(3)).wait(timeout=LONG) is not None
    with suppress(CheckpointError):
        manager.close()
    assert manager.steps() == [3]


def test_a_load_that_discards_shares_the_lease_with_an_interrupted_save() -> None:
    inner = fresh_store()
    with manager_at(inner) as first:
        for step in (1, 2):
            first.save(step, state_of(step)).wait()
    gate = Gate(inner, "put_if_absent", "accepted")
    gate.action = interrupt
    manager = manager_at(gate.store)
    assert manager.load(state_of(0)) == 2
    with pytest.raises(KeyboardInterrupt):
        manager.save(3, state_of(3))
    opener = threading.Timer(0.1, gate.opened.set)
    opener.start()
    assert manager.load(state_of(0), 1, discard_newer=True) == 1
    opener.join()
    assert manager.load_report is not None and [name[:2] for name in manager.load_report.discarded] == ["2@"]
    with suppress(CheckpointError):
        manager.close(wait=False)
    assert newest_epoch(inner) == 2
