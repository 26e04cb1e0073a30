"""States of torch objects saved and loaded by ranks that are threads."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.torch.framework import TorchFramework
from holdfast.backends.torch.local_shards import Ranks
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, outcomes_of_ranks, run_ranks
from tests.support.tuning import tuned

SMALL = tuned(Settings(chunk_bytes=4096, commit_timeout_seconds=20.0), window_bytes=8192, windows_in_flight=2)

State = dict[str, object]


def declared(tensor: object, shape: Sequence[int], **layout: object) -> Sharded:
    """Return a declaration whose types nobody has checked."""
    return Sharded(tensor, shape, **layout)  # type: ignore[arg-type]


def run_of(comm: ThreadComm, store: MemoryStore) -> CheckpointManager:
    framework = TorchFramework(Ranks(comm.rank, comm.world_size, lambda rank: rank))
    return CheckpointManager.over(store, Job(comm, SystemClock(), SMALL, framework))


def save_on(world_size: int, store: MemoryStore, step: int, state_of: Callable[[int], State]) -> list[object]:
    """Return for each rank its report or its error."""

    def work(comm: ThreadComm) -> object:
        run = run_of(comm, store)
        try:
            return run.save(step, state_of(comm.rank)).wait(timeout=25.0)
        except InvalidError as error:
            return error
        finally:
            try:
                run.close()
            except InvalidError as error:
                assert error is not None

    return outcomes_of_ranks(world_size, work)


def load_on(world_size: int, store: MemoryStore, step: int, state_of: Callable[[int], State]) -> list[State]:
    def work(comm: ThreadComm) -> State:
        run = run_of(comm, store)
        state = state_of(comm.rank)
        assert run.load(state, step) == step
        run.close()
        return state

    return run_ranks(world_size, work)


def fresh_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def refused(outcomes: Sequence[object]) -> list[str]:
    assert all(isinstance(each, InvalidError) for each in outcomes), outcomes
    return [str(each) for each in outcomes]
