"""A reader lease on a step whose manifest moves while the lease is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.manifest import decode_manifest
from holdfast.core.format.names import aside_key, manifest_key
from holdfast.core.format.step_name import StepName
from holdfast.errors import MissingError, UnavailableError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.reader import ReaderLease, ReaderLeases, leases
from holdfast.stored.repository.catalog import read_manifest_bytes
from holdfast.stored.repository.epochs import current_fence, newest_epoch
from holdfast.stored.repository.interrupted_removal import finish_removals
from holdfast.stored.repository.timelines import displace, run_timelines
from holdfast.training.loading.named_step import find_named, location_of
from tests.doubles.comm import ThreadComm, outcomes_of_ranks
from tests.doubles.faults import FaultPoint, Faults, FaultyStore, raise_error
from tests.unit.ranks import fresh_store, plain, run_of


@pytest.fixture
def rewound() -> MemoryStore:
    """A run with steps 1 to 3 of the first timeline; the second one left at step 1 and saved step 2 again."""
    store = fresh_store()

    def first(comm: ThreadComm) -> None:
        run = run_of(comm, store)
        for step in (1, 2, 3):
            run.save(step, {"p": plain(float(step))}).wait()
        run.load({"p": plain(0.0)}, 1)
        run.save(2, {"p": plain(20.0)}).wait()
        run.close()

    assert outcomes_of_ranks(1, first) == [None]
    return store


def superseded_step(store: MemoryStore) -> tuple[Manifest, CheckpointLocation]:
    """Return manifest and location of the superseded step 3, as a load finds them."""
    (stored,) = run_timelines(store).superseded_at(3)
    assert stored.digest is not None
    _, found = find_named(store, StepName(3, stored.digest[:4]))
    location = location_of(CheckpointLocation(store, "", None, root=store), found)
    return decode_manifest(read_manifest_bytes(store, location.folder, stored.key), ""), location


def move_away(store: MemoryStore) -> None:
    """Move step 3 as a save on a newer timeline does."""
    manifest, _ = superseded_step(store)
    displace(store, 3, manifest.digest, newest_epoch(store))


def take(store: MemoryStore) -> None:
    """Move step 3 as a writer does that is killed then."""
    store.move(manifest_key(3), aside_key(3, b"draws"))


def put_back(store: MemoryStore) -> None:
    """Put step 3 back, as the next writer does."""
    finish_removals(store, current_fence(store))


MOVES = pytest.mark.parametrize("moves", [(move_away,), (take,), (take, put_back)], ids=["away", "taken", "back"])


@MOVES
@pytest.mark.parametrize("count_before", [0, 1])
def test_a_step_that_moves_before_the_lease_is_stored_is_read(
    rewound: MemoryStore, moves: tuple[Callable[[MemoryStore], None], ...], count_before: int
) -> None:
    for move in moves[:count_before]:
        move(rewound)
    manifest, location = superseded_step(rewound)
    for move in moves[count_before:]:
        move(rewound)
    lease = ReaderLease(SystemClock(), 10.0)
    lease.begin(location, manifest)
    assert [each.step for each in leases(rewound)] == [3]
    lease.close()


@MOVES
def test_a_step_that_moves_while_the_lease_is_stored_is_read(
    rewound: MemoryStore, moves: tuple[Callable[[MemoryStore], None], ...]
) -> None:
    manifest, location = superseded_step(rewound)

    def move_on(operation: FaultPoint) -> None:
        for move in moves:
            move(rewound)

    store = FaultyStore(rewound, Faults(move_on, names=("put",), after=True))
    lease = ReaderLease(SystemClock(), 10.0)
    lease.begin(CheckpointLocation(store, location.folder, 3, root=store, digest=location.digest), manifest)
    lease.close()


def test_a_step_that_was_removed_is_not_read(rewound: MemoryStore) -> None:
    manifest, location = superseded_step(rewound)
    rewound.delete([manifest_key(3)])
    with pytest.raises(MissingError, match="is being deleted"):
        ReaderLease(SystemClock(), 10.0).begin(location, manifest)


def test_a_lease_that_could_not_be_deleted_is_dead_for_its_own_process(rewound: MemoryStore) -> None:
    manifest, location = superseded_step(rewound)
    store = FaultyStore(rewound, Faults(raise_error(UnavailableError), names=("delete",)))
    lease, other = ReaderLease(SystemClock(), 10.0), ReaderLease(SystemClock(), 10.0)
    for each in (lease, other):
        each.begin(CheckpointLocation(store, location.folder, 3, root=store, digest=location.digest), manifest)
    lease.close()
    collector = ReaderLeases(rewound, SystemClock())
    assert len(leases(rewound)) == 2 and list(collector.holds(forget=True)) == [3], "another one reads it"
    assert len(leases(rewound)) == 1
    other.close()
    assert leases(rewound) == []
