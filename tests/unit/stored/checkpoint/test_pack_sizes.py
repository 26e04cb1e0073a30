"""Sizes of packs: by pages where a store answers in pages, and the same answer as pack by pack."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.base.types.values import Group
from holdfast.core.engine.parallel_map import CALLS_AT_ONCE
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError, UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.pack_sizes import require_sizes, short_packs
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from tests.doubles.calls import RecordingStore, StoreCall
from tests.doubles.framework import GlobalTensor
from tests.support.tuning import tuned
from tests.unit.ranks import PATIENT, World, plain, saved

ATTEMPT, OTHER_ATTEMPT = "00000000000000aa", "00000000000000bb"
PAGE = 20


class PagedStore(RecordingStore):
    """A store that answers a listing in pages, from any key on; each page is a call. It has no links, as of objects."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.traits = replace(inner.traits, page_entries=PAGE)

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        while True:
            page = list(super().list(prefix, after=after, up_to=up_to))[:PAGE]
            yield from page
            if len(page) < PAGE or page[-1].key == up_to:
                return
            after = page[-1].key

    def link(self, key: str, new_key: str) -> bool:
        self.size(key)
        return False


def names_of(calls: list[StoreCall]) -> list[str]:
    return [call.name for call in calls if call.name in ("list", "size")]


def manifest_of(packs: list[FileRecord]) -> Manifest:
    names = ("layouts", "parts", "indexes")
    texts = {"run_id": "run", "created": "", "parent": None, "world_size": 1, "software": {}, "tensors": 0}
    return Manifest(
        **texts,  # type: ignore[arg-type]
        **dict.fromkeys(names, ()),  # type: ignore[arg-type]
        step=2,
        attempt=ATTEMPT,
        tensor_bytes=0,
        aliases={},
        tree=Group("dict", {}),
        packs=tuple(packs),
    )


def drawn_packs(chance: random.Random, store: Store) -> list[FileRecord]:
    """Store packs of two steps, some of them missing, short or long; return what a manifest says of them."""
    records = []
    strangers = [f"r{rank:05d}-{number}" for rank in range(40) for number in range(1, 4)]
    for folder, named in (("", 60), ("enc/", 30), (f"step-000000000001/{OTHER_ATTEMPT}/", 25)):
        stems = chance.sample(strangers, chance.choice((named, CALLS_AT_ONCE, 3)))
        inside = folder if folder.startswith("step-") else f"{step_folder(2)}{ATTEMPT}/{folder}"
        for stem in strangers if chance.random() < 0.5 else stems:
            pack_bytes = chance.randrange(1, 9)
            fault = chance.choice((None,) * 9 + (-1, 1, "missing"))
            if fault != "missing":
                store.put(f"{inside}{stem}.safetensors", bytes(pack_bytes + (fault if isinstance(fault, int) else 0)))
            if stem in stems:
                records.append(FileRecord(f"{folder}{stem}.safetensors", pack_bytes, "0" * 32))
    store.put(f"{step_folder(2)}{ATTEMPT}/parts/r00000.msgpack", b"1")
    chance.shuffle(records)
    return records


def test_pages_and_single_requests_find_the_same() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for number in range(12):
        require_same_findings(random.Random(seed + number))


def require_same_findings(chance: random.Random) -> None:
    memory = MemoryStore(uuid.uuid4().hex)
    records = drawn_packs(chance, memory)
    stored = {entry.key: entry.bytes for entry in memory.list()}
    found = []
    for store in (memory, PagedStore(memory)):
        location = CheckpointLocation(store, step_folder(2), 2, root=store)
        packs = location.packs_in(ATTEMPT)
        short = short_packs(store, location.folder, manifest_of(records), packs)
        found.append({name: (readable, str(error)) for name, (readable, error) in short.items()})
        keys = {record.name: packs(record.name).key for record in records}
        wrong = [keys[record.name] for record in records if stored.get(keys[record.name]) != record.bytes]
        if wrong:
            with pytest.raises(CorruptError) as error:
                require_sizes(records, packs, 2)
            assert any(key in str(error.value) for key in wrong), "the error names a pack that is wrong"
        else:
            require_sizes(records, packs, 2)
    assert found[0] == found[1]


@pytest.mark.parametrize("count", (CALLS_AT_ONCE, CALLS_AT_ONCE + 1, PAGE - 1, 2 * CALLS_AT_ONCE))
def test_no_pack_is_listed_twice(count: int) -> None:
    memory = MemoryStore(uuid.uuid4().hex)
    records = [FileRecord(f"r00000-{number}.safetensors", 1, "0" * 32) for number in range(1, count + 1)]
    for record in records:
        memory.put(f"{step_folder(2)}{ATTEMPT}/{record.name}", b"1")
    store = PagedStore(memory)
    location = CheckpointLocation(store, step_folder(2), 2, root=store)
    assert not short_packs(store, location.folder, manifest_of(records), location.packs_in(ATTEMPT))
    assert names_of(store.take()) == ["list"] * (count // PAGE + 1)


def test_a_wrapper_is_as_paged_as_what_it_wraps() -> None:
    memory = MemoryStore(uuid.uuid4().hex)
    assert memory.traits.page_entries is None
    assert RecordingStore(memory).traits.page_entries is None
    assert RecordingStore(PagedStore(memory)).traits.page_entries == PAGE


def state_of(value: float) -> dict[str, GlobalTensor]:
    """A state of which each rank of two writes about 25 packs of a page."""
    return {f"w{number}": plain(value + number, count=PAGE_BYTES // 4) for number in range(50)}


def cut_world() -> tuple[World, PagedStore]:
    memory = MemoryStore(uuid.uuid4().hex, object_bytes_max=3 * PAGE_BYTES)
    paged = PagedStore(memory)
    settings = tuned(PATIENT, unchanged_bytes_min=1024)
    return World(2, settings, store=memory, stores={0: paged, 1: paged}), paged


def test_a_commit_asks_for_pages_and_not_for_each_pack() -> None:
    world, store = cut_world()
    calls: list[StoreCall] = []

    def part(rank: int, run: CheckpointManager) -> object:
        assert not isinstance(saved(run, 1, state_of(0)), Exception)
        if rank == 0:
            calls.extend(store.take())
        return "done"

    assert world.play(part) == ["done", "done"]
    packs = [record.name for record in world.manifest(1).packs]
    assert len(packs) > 2 * PAGE
    assert not [call for call in calls if call.name == "size" and call.subject.endswith(".safetensors")]
    attempt = f"{step_folder(1)}{world.manifest(1).attempt}/"
    pages = [call for call in calls if call.name == "list" and call.subject == attempt]
    assert len(pages) == -(-len(packs) // PAGE), "one request for as many packs as a page holds"


@pytest.mark.parametrize("fault", ["missing", "short", "long"])
def test_a_pack_that_changes_before_the_commit_is_named_and_nothing_is_committed(fault: str) -> None:
    """A rank's vote is no proof: here a rank says more than is stored, or something removes what it had stored."""
    world, store = cut_world()
    changed = []

    def change(name: str, subject: str) -> None:
        if name == "put_if_absent" and "/parts/r00001" in subject:
            # Rank 1 has written its packs, and votes after this.
            packs = [entry for entry in world.store.list() if "/r00001-" in entry.key]
            pack = packs[len(packs) // 2]
            if fault == "missing":
                world.store.delete([pack.key])
            else:
                world.store.put(pack.key, bytes(pack.bytes + (1 if fault == "long" else -1)))
            changed.append(pack.key)

    with store.watched(change):
        errors = world.play(lambda _, run: saved(run, 1, state_of(0)))
    assert world.committed() == []
    assert len(changed) == 1
    for error in errors:
        assert isinstance(error, CorruptError) and changed[0] in str(error), error


def test_unchanged_packs_are_looked_at_by_pages() -> None:
    world, store = cut_world()
    counts = []

    def part(rank: int, run: CheckpointManager) -> object:
        state = {name: replace(tensor) for name, tensor in state_of(0).items()}
        for step in (1, 2, 3):
            assert not isinstance(saved(run, step, state), Exception)
            if rank == 0:
                counts.append(names_of(store.take()).count("size"))
        return "done"

    assert world.play(part) == ["done", "done"]
    assert {record.name.partition("/")[0] for record in world.manifest(3).packs} == {"step-000000000001"}
    assert max(counts[1:]) < PAGE, "sizes of 50 packs come from listings"


@pytest.mark.parametrize("is_torn", [False, True], ids=("whole", "torn"))
def test_a_collection_looks_at_unchanged_packs_by_pages(is_torn: bool) -> None:
    world, store = cut_world()
    collector = CheckpointGC(store, SystemClock(), None, None)
    reasons: list[tuple[str, ...]] = []

    def part(rank: int, run: CheckpointManager) -> object:
        state = state_of(0)
        for step in (1, 2, 3):
            assert not isinstance(saved(run, step, state), Exception)
            if rank == 0 and step == 1:
                collector.survey()  # It remembers step 1 from here on, and lists its folder no more.
        return "done"

    assert world.play(part) == ["done", "done"]
    packs = [record.name for record in world.manifest(3).packs]
    assert len(packs) > 2 * PAGE
    if is_torn:
        world.store.delete([packs[7]])
    store.take()
    reasons.append(collector.survey().reasons[3])
    looks = [call for call in store.take() if call.name == "size" and call.subject.endswith(".safetensors")]
    assert (packs[7] in " ".join(reasons[0])) == is_torn
    # The one that is missing is looked at by itself, for step 3 and for step 2.
    assert len(looks) == 0 if not is_torn else {call.subject for call in looks} == {packs[7]}


class SilentStore(ForwardingStore):
    """A store that does not answer for some keys."""

    def __init__(self, inner: Store, silent: tuple[str, ...], *, has_parity: bool) -> None:
        super().__init__(inner)
        self.traits, self._silent = replace(inner.traits, has_parity=has_parity), silent

    def size(self, key: str) -> int:
        if key.endswith(self._silent):
            raise UnavailableError(f"{key}: nodes do not answer")
        return super().size(key)


@pytest.mark.parametrize(
    ("silent", "changed", "has_parity", "are_voted", "expected"),
    [
        ("r00001.safetensors", {}, True, True, None),
        ("r00001.safetensors", {}, False, True, UnavailableError),
        ("r00001.safetensors", {}, True, False, UnavailableError),
        ("-", {"r00001.safetensors": b""}, True, True, CorruptError),
        ("-", {"r00001.safetensors": None}, True, True, CorruptError),
        ("r00002.safetensors", {}, True, True, UnavailableError),
    ],
    ids=["silent", "no parity", "not just stored", "another size", "absent", "of an older step"],
)
def test_a_commit_goes_on_without_a_node_that_has_just_stored_its_packs(
    silent: str, changed: dict[str, bytes | None], has_parity: bool, are_voted: bool, expected: type[Exception] | None
) -> None:
    inner = MemoryStore(uuid.uuid4().hex)
    folder, older = f"{step_folder(2)}{ATTEMPT}/", f"{step_folder(1)}{OTHER_ATTEMPT}/r00002.safetensors"
    keys = {"r00000.safetensors": b"ab", "r00001.safetensors": b"cd"} | changed
    for name, data in keys.items():
        if data is not None:
            inner.put(folder + name, data)
    inner.put(older, b"ef")
    store = SilentStore(inner, (silent,), has_parity=has_parity)
    records = [FileRecord(name, 2, "0" * 32) for name in (*keys, older)]
    packs = CheckpointLocation(store, step_folder(2), 2, root=store).packs_in(ATTEMPT)
    with nullcontext() if expected is None else pytest.raises(expected):
        require_sizes(records, packs, 2, are_voted=are_voted)
