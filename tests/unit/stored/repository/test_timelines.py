"""Manifests of a run by timeline, in a run whose small files are damaged or whose manifests are just being moved."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.types.epoch import Epoch, Holder
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.base.types.values import Group
from holdfast.core.format.manifest import decode_manifest, encode_manifest
from holdfast.core.format.names import accepted_key, manifest_key, manifest_keys, step_folder, superseded_key
from holdfast.core.format.step_name import StepName
from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation, manifest_bytes_at
from holdfast.stored.publishing.manifest import clear_fenced
from holdfast.stored.repository.catalog import manifest_digest, step_folders
from holdfast.stored.repository.epochs import accepted_steps, current_fence, declare_timelines, put_accepted, put_epoch
from holdfast.stored.repository.quarantine import identity_at, quarantine, supersede
from holdfast.stored.repository.timelines import (
    RunTimelines,
    StoredManifest,
    committed_steps,
    displace,
    moved_steps,
    run_timelines,
)
from holdfast.training.loading.named_step import find_named, location_of
from tests.doubles.faults import FaultPoint, Faults, FaultyStore

HOLDER = Holder("node-7", "boot", "pid:[1] time:[2]", 4711, 99, "2026-01-01T00:00:00+00:00", "ab" * 16, 10.0)
SECOND = FIRST_TIMELINE.fork(2, "2" * 16, 1, "d" * 32)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def publish(store: MemoryStore, step: int, timeline: Timeline = FIRST_TIMELINE, epoch: int = 1) -> str:
    """Put a manifest; return its digest."""
    data = encode_manifest(
        Manifest(
            run_id="run", step=step, attempt="0" * 16, created="", parent=None, world_size=1, layouts=(), software={},
            tensors=0, tensor_bytes=0, aliases={}, tree=Group("dict", {}), packs=(), parts=(), indexes=(), epoch=epoch,
            timeline=timeline,
        )
    )  # fmt: skip
    store.put(manifest_key(step), data)
    return decode_manifest(data, "").digest


def begin(store: MemoryStore, number: int) -> None:
    """Begin an epoch as its holder does."""
    put_epoch(store, Epoch(number, "run", HOLDER))
    fence = current_fence(store)
    moved = moved_steps(store, fence) if fence.has_timelines else None
    put_accepted(store, number, "run", accepted_steps(store, fence, step_folders(store)), moved)


def damage(store: MemoryStore, key: str) -> None:
    """Flip one bit in the middle of an object."""
    data = bytearray(store.get(key, 1 << 20))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


@pytest.fixture
def rewound(store: MemoryStore) -> MemoryStore:
    """A run with steps 1 to 3 of the first timeline; the second one left at step 1 and saved step 2 again."""
    begin(store, 1)
    digests = {step: publish(store, step) for step in (1, 2, 3)}
    declare_timelines(store, 1, SECOND)
    displace(store, 2, digests[2], 1)
    publish(store, 2, SECOND)
    assert committed_steps(store) == [1, 2]
    return store


def digest_of(store: MemoryStore, step: int) -> str:
    """Return the digest of the manifest in the folder of a step."""
    return decode_manifest(store.get(manifest_key(step), 1 << 20), "").digest


def moved_key(store: MemoryStore) -> str:
    """Return the key of the one manifest under `superseded/`."""
    (entry,) = store.list("superseded/")
    return entry.key


# ------------------------------------------------------------------------------------------ damaged lists


def test_the_only_list_damaged_leaves_the_timelines_as_they_are(rewound: MemoryStore) -> None:
    before = run_timelines(rewound)
    damage(rewound, accepted_key(1))
    assert run_timelines(rewound) == before
    # The list of the next writer must have readers without timelines refuse the run, as the damaged one did.
    begin(rewound, 2)
    assert current_fence(rewound).has_timelines
    assert run_timelines(rewound) == before


# ------------------------------------------------------------------------------------- manifests in motion


def test_a_manifest_that_moves_while_a_reader_lists_is_seen(rewound: MemoryStore) -> None:
    digest = digest_of(rewound, 3)

    def move(point: FaultPoint) -> None:
        if point.subject == "superseded/":
            faults.heal()
            displace(rewound, 3, digest, 1)

    # A reader that lists the folder of moved manifests first sees the manifest nowhere.
    faults = Faults(move, names=("list",), lasting=True, after=True)
    timelines = run_timelines(FaultyStore(rewound, faults))
    assert [manifest.step for manifest in timelines.superseded] == [2, 3]


# -------------------------------------------------------------------------------------------- late writers


def test_a_late_writer_moves_no_manifest_of_a_newer_writer(rewound: MemoryStore) -> None:
    digest = digest_of(rewound, 3)
    third = SECOND.fork(3, "3" * 16, 2, digest_of(rewound, 2))

    def take_over(point: FaultPoint) -> None:
        begin(rewound, 2)
        publish(rewound, 3, third, epoch=2)

    # The late writer stops after it has put the copy. A newer one saves the step meanwhile.
    late = FaultyStore(rewound, Faults(take_over, names=("put_if_absent",), after=True))
    with pytest.raises(ConflictError, match="epoch 1 is over"):
        displace(late, 3, digest, 1)
    assert committed_steps(rewound) == [1, 2, 3]


def test_a_late_writer_removes_no_manifest_in_place_of_a_quarantined_one(rewound: MemoryStore) -> None:
    quarantine(rewound, 2, manifest_key(2), identity_at(rewound, manifest_key(2)), "damage", "")

    def take_over(point: FaultPoint) -> None:
        begin(rewound, 2)
        publish(rewound, 2, SECOND, epoch=2)

    late = FaultyStore(rewound, Faults(take_over, names=("put_if_absent",), after=True))
    with pytest.raises(ConflictError, match="epoch 1 is over"):
        supersede(late, 2, 1)
    assert committed_steps(rewound) == [1, 2]


class _Crash(Exception):
    """The process is gone."""


def moved_late(store: MemoryStore, act: Callable[[int], None], third_writer: bool = False) -> str:
    """Move step 3 away as a writer that is stopped after its last look at the epoch, while another one saves it.

    Args:
        store: The run.
        act: Called before each operation from the one that takes the manifest, with the number of the operation.
        third_writer: Whether one more writer saves the step again once it has left its folder.
    Returns:
        The digest of the newest manifest of the step.
    """
    newer = SECOND.fork(3, "3" * 16, 2, digest_of(store, 2))
    digests: list[str] = []
    count = 0

    def step_in(operation: FaultPoint) -> None:
        nonlocal count
        if not digests and operation.name != "move":
            return
        if not digests:
            begin(store, 2)
            digests.append(publish(store, 3, newer, epoch=2))
        elif third_writer and len(digests) == 1:
            begin(store, 3)
            digests.append(publish(store, 3, newer.fork(4, "4" * 16, 2, digest_of(store, 2)), epoch=3))
        count += 1
        act(count)

    late = FaultyStore(store, Faults(step_in, lasting=True))
    with pytest.raises((ConflictError, _Crash), match=r"epoch 1 is over|^$"):
        displace(late, 3, digest_of(store, 3), 1)
    return digests[-1]


@pytest.mark.parametrize("third_writer", [False, True])
def test_a_late_writer_puts_back_what_it_took(rewound: MemoryStore, third_writer: bool) -> None:
    before = {manifest.digest for manifest in (*run_timelines(rewound).chain, *run_timelines(rewound).superseded)}
    counts: list[int] = []

    def look(count: int) -> None:
        counts.append(count)
        # The manifest that the other writer acknowledged is seen at every moment.
        assert run_timelines(rewound).newest.number == (4 if third_writer and count > 1 else 3)

    digest = moved_late(rewound, look, third_writer)
    assert len(counts) > 4
    timelines = run_timelines(rewound)
    assert [manifest.step for manifest in timelines.chain] == [1, 2, 3] and digest_of(rewound, 3) == digest
    known = {manifest.digest for manifest in (*timelines.chain, *timelines.superseded)}
    assert known > before and len(known) == len(before) + 1 + third_writer


@pytest.mark.parametrize("third_writer", [False, True])
@pytest.mark.parametrize("at", range(2, 10))
def test_a_late_writer_that_is_killed_after_it_took_a_manifest_loses_none(
    rewound: MemoryStore, at: int, third_writer: bool
) -> None:
    def kill(count: int) -> None:
        if count == at:
            raise _Crash

    digest = moved_late(rewound, kill, third_writer)
    seen = run_timelines(rewound)
    assert seen.chain[-1].digest == digest
    # The next writer gives a manifest that was left behind the name that tags and `step@digest` look for.
    begin(rewound, 4)
    after = run_timelines(rewound)
    assert {(one.step, one.digest) for one in (*after.chain, *after.superseded)} == {
        (one.step, one.digest) for one in (*seen.chain, *seen.superseded)
    }
    for one in (*after.chain, *after.superseded):
        assert one.digest is not None
        assert one.digest in [manifest_digest(rewound, one.step, key) for key in manifest_keys(one.step, one.digest)]


@pytest.mark.parametrize("verb", ["displace", "supersede", "clear_fenced"])
def test_a_late_writer_leaves_a_manifest_that_came_after_its_look(rewound: MemoryStore, verb: str) -> None:
    key = manifest_key(3)
    if verb == "supersede":
        quarantine(rewound, 3, key, identity_at(rewound, key), "damage", "")
    begin(rewound, 2)
    if verb == "clear_fenced":
        # Epoch 1 publishes too late: this manifest does not count.
        publish(rewound, 3, SECOND)
    digests: list[str] = []

    def take_over(point: FaultPoint) -> None:
        begin(rewound, 3)
        digests.append(publish(rewound, 3, SECOND.fork(3, "3" * 16, 2, digest_of(rewound, 2)), epoch=3))

    late = FaultyStore(rewound, Faults(take_over, names=("move",)))
    with pytest.raises(ConflictError, match="epoch 2 is over"):
        if verb == "displace":
            displace(late, 3, digest_of(rewound, 3), 2)
        elif verb == "supersede":
            supersede(late, 3, 2)
        else:
            clear_fenced(CheckpointLocation(late, step_folder(3), 3), 2)
    assert [digest_of(rewound, 3)] == digests
    assert committed_steps(rewound) == [1, 2, 3]


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_a_step_that_moves_after_it_was_chosen_is_read_where_it_is(rewound: MemoryStore, is_saved_again: bool) -> None:
    home = CheckpointLocation(rewound, "", None, root=rewound)
    third = digest_of(rewound, 3)
    location = location_of(home, find_named(rewound, StepName(3, third[:4]))[1])
    displace(rewound, 3, third, 1)
    if is_saved_again:
        publish(rewound, 3, SECOND)
    assert decode_manifest(manifest_bytes_at(location), "").digest == third


def test_a_step_that_is_replaced_after_it_was_chosen_is_not_read(rewound: MemoryStore) -> None:
    home = CheckpointLocation(rewound, "", None, root=rewound)
    location = location_of(home, find_named(rewound, StepName(2))[1])
    publish(rewound, 2, SECOND, epoch=2)
    with pytest.raises(MissingError, match=r"was replaced or removed since .* Choose the step again"):
        manifest_bytes_at(location)


# ------------------------------------------------------------------------ moved manifests that cannot be read


def test_a_new_writer_stops_at_a_moved_manifest_that_cannot_be_read(rewound: MemoryStore) -> None:
    def refuse(point: FaultPoint) -> None:
        if point.subject == key:
            raise InvalidError(f"{key}: permission denied")

    key = moved_key(rewound)
    faulty = FaultyStore(rewound, Faults(refuse, names=("get",), lasting=True))
    with pytest.raises(InvalidError, match=r"permission denied.*step 2 counts is unknown"):
        moved_steps(faulty, current_fence(rewound))


@pytest.mark.parametrize("place", [0.5, -30, -10])
def test_a_damaged_moved_manifest_counts_again_once_it_is_repaired(rewound: MemoryStore, place: float) -> None:
    before, key = run_timelines(rewound), moved_key(rewound)
    whole = rewound.get(key, 1 << 20)
    # One bit in the text, in the last and in the first half of the digest that it states.
    at = int(place * len(whole)) if place > 0 else int(place)
    damaged = bytearray(whole)
    damaged[at] ^= 2
    rewound.put(key, bytes(damaged))
    begin(rewound, 2)
    # The next writer no longer finds the digest in the text: only the list of epoch 2 has it.
    rewound.put(key, whole[:100])
    begin(rewound, 3)
    rewound.put(key, whole)
    assert run_timelines(rewound) == before


def test_a_damaged_moved_manifest_that_nothing_replaced_is_tried(rewound: MemoryStore) -> None:
    # The first timeline goes on from step 3: nothing of a newer timeline counts any more.
    rewound.delete([manifest_key(2)])
    assert [manifest.step for manifest in run_timelines(rewound).chain] == [1, 2, 3]
    displace(rewound, 3, digest_of(rewound, 3), 1)
    key = next(entry.key for entry in rewound.list("superseded/") if entry.key.startswith("superseded/000000000003."))
    damage(rewound, key)
    chain = run_timelines(rewound).chain
    assert [(manifest.step, manifest.timeline is None) for manifest in chain] == [(1, False), (2, False), (3, True)]
    publish(rewound, 3, SECOND)
    timelines = run_timelines(rewound)
    assert [manifest.step for manifest in timelines.chain] == [1, 3]
    assert [manifest.step for manifest in timelines.superseded] == [2, 3]


# ---------------------------------------------------------- the newest timeline is damaged or under quarantine


def flip(store: MemoryStore, key: str, place: bytes) -> None:
    """Flip one bit of the last byte of a text in an object."""
    data = bytearray(store.get(key, 1 << 20))
    data[data.index(place) + len(place) - 1] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_damaged_manifest_still_states_the_newest_timeline(rewound: MemoryStore, is_moved: bool) -> None:
    key, digest = manifest_key(2), digest_of(rewound, 2)
    if is_moved:
        # A save of the next timeline was killed after it had moved the manifest.
        displace(rewound, 2, digest, 1)
        key = superseded_key(2, digest)
    flip(rewound, key, b"run_id")
    stored = run_timelines(rewound)
    assert stored.newest == SECOND and committed_steps(rewound) == [1, 2], "step 3 was left behind"


def test_a_manifest_under_quarantine_still_states_the_newest_timeline(rewound: MemoryStore) -> None:
    key = manifest_key(2)
    quarantine(rewound, 2, key, identity_at(rewound, key), "its data is damaged", "")
    assert supersede(rewound, 2, 1)
    stored = run_timelines(rewound)
    assert stored.newest == SECOND and committed_steps(rewound) == [1], "step 3 was left behind"


@pytest.mark.parametrize("place", [b'"number": 2', b"2" * 16, b'"d' + b"d" * 31])
def test_a_timeline_that_contradicts_another_manifest_counts_for_nothing(rewound: MemoryStore, place: bytes) -> None:
    publish(rewound, 4, SECOND)
    flip(rewound, manifest_key(2), place)
    assert run_timelines(rewound).newest == SECOND
    assert committed_steps(rewound) == [1, 2, 4]


def test_a_number_that_the_chain_has_twice_names_the_newest() -> None:
    older, newer = StoredManifest(2, "superseded/…", "a", FIRST_TIMELINE), StoredManifest(2, "…", "b", SECOND)
    assert RunTimelines(SECOND, (older, newer), ()).at(2) is newer
