"""A job of threads over a memory store, as the manager's tests need it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast._face.wiring import codecs
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.tensor import MeshLayout, Placement, Role
from holdfast.base.ports.comm import KeyValueStore
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import Piece
from holdfast.core.format.names import step_folder
from holdfast.settings import Settings
from holdfast.stored.repository.catalog import read_index, read_manifest
from holdfast.stored.repository.timelines import committed_steps
from holdfast.training.coordination.job import Job
from tests.doubles.comm import ThreadComm, ThreadGroup, outcomes_of_ranks
from tests.doubles.framework import GlobalTensor, NumpyFramework
from tests.support.tuning import tuned

PATIENT = tuned(Settings(chunk_bytes=4096, commit_timeout_seconds=20.0), window_bytes=8192, windows_in_flight=2)
HASTY = tuned(Settings(chunk_bytes=4096, commit_timeout_seconds=1.0), window_bytes=8192, windows_in_flight=2)

State = Mapping[str, object]


def fresh_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def run_of(
    comm: ThreadComm, store: Store, settings: Settings = PATIENT, observers: Sequence[Observer] = ()
) -> CheckpointManager:
    return CheckpointManager.over(
        store, Job(comm, SystemClock(), settings, NumpyFramework(comm.rank), codecs=codecs()), observers=observers
    )


def plain(value: float, *, role: Role = Role.PARAMETER, count: int = 100) -> GlobalTensor:
    """A plain tensor of one value throughout."""
    return GlobalTensor("float32", np.full(count, value, dtype=np.float32), None, role)


def sharded(world_size: int, *, rows: int = 16, ranks: tuple[int, ...] | None = None) -> GlobalTensor:
    """A tensor split by rows over a 1-D mesh."""
    mesh = tuple(range(world_size)) if ranks is None else ranks
    array = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    return GlobalTensor("float32", array, MeshLayout((len(mesh),), mesh, (Placement(0),)))


@dataclass(frozen=True, slots=True)
class World:
    """A job whose ranks live as long as the test: one thread group, one run per rank."""

    world_size: int
    settings: Settings = PATIENT
    store: MemoryStore = field(default_factory=fresh_store)
    stores: Mapping[int, Store] = field(default_factory=dict)
    """Ranks that see the store through something else."""

    boards: Mapping[int, Callable[[KeyValueStore], KeyValueStore]] = field(default_factory=dict)
    """Ranks that see the board through something else."""

    observers: Sequence[Observer] = ()
    """Who hears of every rank's saves and loads."""

    chosen: Mapping[int, Settings] = field(default_factory=dict)
    """Ranks with other settings."""

    def play(self, part: Callable[[int, CheckpointManager], object]) -> list[object]:
        """Return for each rank what its part returned or raised; every run is closed afterwards."""

        def work(comm: ThreadComm) -> object:
            settings = self.chosen.get(comm.rank, self.settings)
            run = run_of(comm, self.stores.get(comm.rank, self.store), settings, self.observers)
            try:
                return part(comm.rank, run)
            finally:
                # A failure that close reports again has been returned by the part already.
                try:
                    run.close()
                except Exception as error:
                    assert error is not None

        def view(rank: int, key_value_store: KeyValueStore) -> KeyValueStore:
            return self.boards[rank](key_value_store) if rank in self.boards else key_value_store

        # A rank that raises leaves the others to themselves, as it does where no collective runs.
        return outcomes_of_ranks(self.world_size, work, group=ThreadGroup(self.world_size), view_of=view)

    def committed(self) -> list[int]:
        return committed_steps(self.store)

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self.store, step_folder(step))

    def pieces(self, step: int) -> dict[str, list[Piece]]:
        index = read_index(self.store, step_folder(step), self.manifest(step))
        return {fqn: list(index.pieces_of(fqn)) for fqn in index.tensors}

    def files(self) -> list[str]:
        return sorted(entry.key for entry in self.store.list())


def saved(run: CheckpointManager, step: int, state: State) -> object:
    """Save and wait; return the report or the error."""
    try:
        return run.save(step, state).wait(timeout=25.0)
    except Exception as error:
        return error
