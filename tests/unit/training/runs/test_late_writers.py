"""A writer that was stopped while it moved a manifest away, and goes on after others have saved the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import aside_key, manifest_key, step_folder
from holdfast.errors import CheckpointError, ConflictError
from holdfast.policies import AnyOf, EveryNth, LatestN
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.repository.catalog import read_manifest, read_run_id
from holdfast.stored.repository.epochs import (
    RELEASED,
    current_fence,
    newest_epoch,
    put_epoch,
    put_heartbeat,
    read_epoch,
)
from holdfast.stored.repository.interrupted_removal import finish_removals
from holdfast.stored.repository.quarantine import backup, supersede
from holdfast.stored.repository.timelines import moved_manifests
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore
from tests.unit.ranks import fresh_store, plain, run_of, saved


def value_of(store: MemoryStore, step: int | None = None) -> tuple[int | None, float]:
    """Return the step that a restart loads, and its content."""

    def work(comm: ThreadComm) -> tuple[int | None, float]:
        tensor, run = plain(0.0), run_of(comm, store)
        loaded = run.load({"p": tensor}, step)
        run.close()
        return loaded, float(tensor.array[0])

    (outcome,) = outcomes_of_ranks(1, work)
    assert isinstance(outcome, tuple), outcome
    return outcome


def take_over(store: MemoryStore, value: float, step: int = 2) -> None:
    """Save a step on a timeline that leaves the one before, as a new job does once the lease of the former is over."""

    def work(comm: ThreadComm) -> None:
        put_heartbeat(store, newest_epoch(store), RELEASED)
        run = run_of(comm, store)
        run.load({"p": plain(0.0)}, step - 1)
        run.save(step, {"p": plain(value)}).wait()
        run.close()

    assert outcomes_of_ranks(1, work) == [None]


@pytest.mark.parametrize("writers", [1, 2])
def test_a_late_writer_does_not_remove_what_others_saved_at_the_step(writers: int) -> None:
    store = fresh_store()

    def first_life(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        for step in (1, 2):
            run.save(step, {"p": plain(float(step))}).wait()
        run.close()

    assert outcomes_of_ranks(1, first_life) == [None]
    stopped: list[FaultPoint] = []

    def stop(operation: FaultPoint) -> None:
        # Between the look at the epoch and the call that takes the manifest from the folder.
        if operation.subject.endswith("2/manifest.json") and not stopped:
            stopped.append(operation)
            for number in range(writers):
                take_over(store, 10.0 + number)

    def late(comm: ThreadComm) -> object:
        run = run_of(comm, FaultyStore(store, Faults(stop, names=("delete", "move"), lasting=True)))
        run.load({"p": plain(0.0)}, 1)
        outcome = saved(run, 2, {"p": plain(99.0)})
        run.close()
        return outcome

    (outcome,) = outcomes_of_ranks(1, late)
    assert stopped and isinstance(outcome, CheckpointError) and "took over" in str(outcome), outcome
    assert value_of(store) == (2, 9.0 + writers)


def collect_late(store: MemoryStore, stop: Callable[[FaultPoint], None]) -> None:
    """Keep steps 3 and 5 and remove step 4, as a collector that is stopped where it takes the manifest."""
    run_id = read_run_id(store)
    assert run_id is not None
    stopped: list[FaultPoint] = []

    def meet(operation: FaultPoint) -> None:
        if operation.subject.endswith("/manifest.json") and not stopped:
            stopped.append(operation)
            stop(operation)

    late = FaultyStore(store, Faults(meet, names=("delete", "move"), lasting=True))
    clock = SystemClock()
    try:
        with hold_writer_lease(store, clock, 60.0, run_id) as writer_lease:
            CheckpointGC(late, clock, AnyOf(EveryNth(3), LatestN(1)), writer_lease).collect(0, lambda _: False)
    finally:
        assert stopped


@pytest.fixture
def three_steps() -> MemoryStore:
    store = fresh_store()

    def first_life(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        for step in (3, 4, 5):
            run.save(step, {"p": plain(float(step))}).wait()
        run.close()

    assert outcomes_of_ranks(1, first_life) == [None]
    return store


def test_a_late_collector_does_not_remove_what_others_saved_at_the_step(three_steps: MemoryStore) -> None:
    with pytest.raises(ConflictError, match="took over"):
        collect_late(three_steps, lambda _: take_over(three_steps, 10.0, step=4))
    assert value_of(three_steps) == (4, 10.0)


def test_a_late_collector_does_not_remove_a_step_that_others_went_on_from(three_steps: MemoryStore) -> None:
    with pytest.raises(ConflictError, match="took over"):
        collect_late(three_steps, lambda _: take_over(three_steps, 10.0, step=5))
    assert value_of(three_steps, 4) == (4, 4.0)


class _Killed(Exception):
    """The process is gone."""


@pytest.mark.parametrize("verb", ["get", "delete"])
def test_what_a_killed_collector_took_goes_with_the_next_collection(three_steps: MemoryStore, verb: str) -> None:
    def kill(operation: FaultPoint) -> None:
        if operation.subject.startswith("superseded/"):
            raise _Killed

    killed = FaultyStore(three_steps, Faults(kill, names=(verb,), lasting=True))
    clock, policy = SystemClock(), AnyOf(EveryNth(3), LatestN(1))
    run_id = read_run_id(three_steps)
    assert run_id is not None
    with hold_writer_lease(three_steps, clock, 60.0, run_id) as writer_lease, pytest.raises(_Killed):
        CheckpointGC(killed, clock, policy, writer_lease).collect(0, lambda _: False)
    assert len(moved_manifests(three_steps).manifests) == 1
    with hold_writer_lease(three_steps, clock, 60.0, run_id) as writer_lease:
        assert read_manifest(three_steps, step_folder(4)).step == 4, "a step that goes later is whole until then"
        CheckpointGC(three_steps, clock, policy, writer_lease).collect(0, lambda _: False)
    assert not moved_manifests(three_steps).manifests
    assert not list(three_steps.list(step_folder(4)))
    assert value_of(three_steps) == (5, 5.0)


@pytest.mark.parametrize("verb", ["get", "delete"])
def test_a_kill_while_a_damaged_manifest_is_set_aside_keeps_no_packs_for_ever(
    three_steps: MemoryStore, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = manifest_key(5)
    three_steps.put(key, three_steps.get(key, 1 << 20)[:-40])
    assert value_of(three_steps) == (4, 4.0), "the damaged step is passed over, and put under quarantine"

    def kill(operation: FaultPoint) -> None:
        if operation.subject.startswith("superseded/"):
            raise _Killed

    run_id = read_run_id(three_steps)
    assert run_id is not None
    clock = SystemClock()
    killed = FaultyStore(three_steps, Faults(kill, names=(verb,), lasting=True))
    with hold_writer_lease(three_steps, clock, 60.0, run_id) as writer_lease, pytest.raises(_Killed):
        supersede(killed, 5, writer_lease.epoch)
    assert moved_manifests(three_steps).damaged
    with hold_writer_lease(three_steps, clock, 60.0, run_id) as writer_lease:
        assert not moved_manifests(three_steps).damaged
        CheckpointGC(three_steps, clock, LatestN(1), writer_lease).collect(0, lambda _: False)
    assert "no pack is removed" not in caplog.text
    assert not list(three_steps.list(step_folder(3)))
    assert value_of(three_steps) == (4, 4.0)


def test_a_moved_manifest_that_was_not_set_aside_goes_back(three_steps: MemoryStore) -> None:
    data = three_steps.get(manifest_key(4), 1 << 20)
    damaged = data[:-40]
    three_steps.put(manifest_key(4), damaged)
    three_steps.move(manifest_key(4), aside_key(4, b"draws"))
    finish_removals(three_steps, current_fence(three_steps))
    assert three_steps.get(manifest_key(4), 1 << 20) == damaged, "it is damaged there as well, and can be repaired"
    assert not list(three_steps.list("superseded/"))


def test_a_moved_manifest_that_was_backed_up_and_is_in_use_again_goes_back(three_steps: MemoryStore) -> None:
    data = three_steps.get(manifest_key(4), 1 << 20)
    # Whatever backed it up, it is not under quarantine, or no longer: it counts.
    backup(three_steps, 4, manifest_key(4), 1 << 20, "manifest.json")
    three_steps.move(manifest_key(4), aside_key(4, b"draws"))
    finish_removals(three_steps, current_fence(three_steps))
    assert three_steps.get(manifest_key(4), 1 << 20) == data
    assert not list(three_steps.list("superseded/"))


def test_a_name_by_digest_with_the_check_digits_by_chance_stays(three_steps: MemoryStore) -> None:
    chance = aside_key(4, b"draws")
    digits = chance.split(".")[1]
    data = three_steps.get(manifest_key(4), 1 << 20)
    sealed = data[: -len(digits) * 2 - 4] + digits.encode() + b"0" * 16 + data[-4:]
    three_steps.put(chance, sealed)
    finish_removals(three_steps, current_fence(three_steps))
    assert three_steps.get(chance, 1 << 20) == sealed


def test_a_step_that_a_late_collector_puts_back_can_be_collected(three_steps: MemoryStore) -> None:
    taken_over: list[FaultPoint] = []

    def take_over_once(operation: FaultPoint) -> None:
        if operation.subject.startswith("superseded/") and not taken_over:
            taken_over.append(operation)
            epoch = read_epoch(three_steps, newest_epoch(three_steps))
            assert epoch is not None
            put_epoch(three_steps, replace(epoch, number=epoch.number + 1))

    late = FaultyStore(three_steps, Faults(take_over_once, names=("get",), lasting=True, after=True))
    run_id, clock, policy = read_run_id(three_steps), SystemClock(), AnyOf(EveryNth(3), LatestN(1))
    assert run_id is not None
    with hold_writer_lease(three_steps, clock, 60.0, run_id) as writer_lease, pytest.raises(ConflictError):
        CheckpointGC(late, clock, policy, writer_lease).collect(0, lambda _: False)
    assert taken_over
    assert value_of(three_steps, 4) == (4, 4.0)
    assert not list(three_steps.list("superseded/"))


def test_a_damaged_copy_of_what_a_killed_writer_took_locks_nobody_out(three_steps: MemoryStore) -> None:
    take_over(three_steps, 10.0, step=4)
    moved = next(each.key for each in three_steps.list("superseded/") if each.key.startswith("superseded/000000000004"))
    data = three_steps.get(moved, 1 << 20)
    aside = aside_key(4, b"abcde")
    three_steps.put(aside, data)
    three_steps.put(moved, data[:200] + bytes([data[200] ^ 3]) + data[201:])
    take_over(three_steps, 11.0, step=5)
    assert value_of(three_steps) == (5, 11.0)
    assert three_steps.get(aside, 1 << 20) == data
