"""A writer that was stopped while it moved a manifest away, and goes on after others have saved the same step."""

from __future__ import annotations

import pytest

from holdfast.errors import CheckpointError
from holdfast.repository.epochs import RELEASED, newest_epoch, put_heartbeat
from holdfast.stores.memory import MemoryStore
from holdfast.testing.comm import ThreadComm, outcomes_of_ranks
from holdfast.testing.faults import FaultPoint, Faults, FaultyStore
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


def take_over(store: MemoryStore, value: float) -> None:
    """Save step 2 on a timeline that leaves step 1, as a new job does once the lease of the former one is over."""

    def work(comm: ThreadComm) -> None:
        put_heartbeat(store, newest_epoch(store), RELEASED)
        run = run_of(comm, store)
        run.load({"p": plain(0.0)}, 1)
        run.save(2, {"p": plain(value)}).wait()
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
