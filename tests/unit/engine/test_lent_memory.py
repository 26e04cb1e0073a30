"""Memory that stores and the engine lend to each other: rooms and pieces of awaited saves, windows of staged ones."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from holdfast.clock import SystemClock
from holdfast.engine.arena import Arena
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.engine.encoding.probe import ChunkProbe
from holdfast.engine.staging import Staging
from holdfast.engine.writing.completions import Completions
from holdfast.engine.writing.write import PackWriter
from holdfast.errors import InvalidError, UnavailableError
from holdfast.ports.forwarding import ForwardingStore
from holdfast.ports.framework import Selection
from holdfast.ports.store import Release, Upload
from holdfast.settings import PAGE_BYTES
from holdfast.stores.memory import MemoryStore
from holdfast.testing.faults import Faults, FaultyStore, raise_error
from holdfast.testing.framework import GlobalTensor, NumpyFramework
from holdfast.types.coding import Kind, Sampling
from holdfast.types.plan import PackItem
from tests.unit.engine.test_write_and_read import KEY, SMALL, arena_for, memory, planned, require_all_back, shards_of

CHOSEN = replace(SMALL, window_bytes=2 * PAGE_BYTES, windows_in_flight=3)
SIZES = [5000, 0, 20, 9 * PAGE_BYTES, 20, 4096, 3000, 8193, 0]


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def whole(sizes: list[int] = SIZES) -> bytes:
    """What is stored without any lending, by one window."""
    store, shards = memory(), shards_of(sizes)
    PackWriter(store, replace(CHOSEN, window_bytes=1 << 20)).write(planned(shards), [each.source for each in shards])
    return store.get(KEY, 1 << 20)


class Passing:
    """An upload that passes every call on to another."""

    def __init__(self, inner: Upload) -> None:
        self.inner = inner

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        return self.inner.room(offset, length_bytes)

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        self.inner.write(offset, data, release)

    def complete(self, total_bytes: int | None = None) -> None:
        self.inner.complete(total_bytes)

    def abort(self) -> None:
        self.inner.abort()


class Watched(Passing):
    """Notes the address of each room and of what is written."""

    def __init__(self, inner: Upload) -> None:
        super().__init__(inner)
        self.rooms: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        room = super().room(offset, length_bytes)
        assert room is not None
        self.rooms[offset] = address(room)
        return room

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        self.written[offset] = address(data)
        super().write(offset, data, release)


class Keeping(Passing):
    """Keeps what it may keep until the object is complete, as a store does that sends an object by one request."""

    def __init__(self, inner: Upload) -> None:
        super().__init__(inner)
        self.kept: dict[int, tuple[memoryview, Release]] = {}
        self.copied = 0

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        return None

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        if release is None:
            self.copied += 1
            super().write(offset, data)
        else:
            self.kept[offset] = data, release

    def complete(self, total_bytes: int | None = None) -> None:
        for offset, (data, _) in self.kept.items():
            super().write(offset, data)
        super().complete(total_bytes)
        self._give_all_back()

    def abort(self) -> None:
        super().abort()
        self._give_all_back()

    def _give_all_back(self) -> None:
        for _, release in self.kept.values():
            release()
        self.kept.clear()


class Wrapping(ForwardingStore):
    """A memory store whose uploads are wrapped."""

    def __init__(self, wrap: Callable[[Upload], Passing]) -> None:
        super().__init__(MemoryStore(uuid.uuid4().hex))
        self._wrap = wrap
        self.uploads: list[Passing] = []

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        upload = self._wrap(
            super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        )
        self.uploads.append(upload)
        return upload


def test_an_awaited_save_copies_straight_into_the_memory_of_the_store() -> None:
    store, shards = Wrapping(Watched), shards_of(SIZES)
    writer = PackWriter(store, CHOSEN)
    writer.write(planned(shards), [each.source for each in shards])
    (upload,) = store.uploads
    assert isinstance(upload, Watched)
    assert len(upload.written) > 5
    assert upload.written == upload.rooms, "a part went by way of other memory"
    assert store.get(KEY, 1 << 20) == whole()


class LentParts:
    """An upload of an object in memory of its sender."""

    def __init__(self, store: TakingLent, key: str, parts: Sequence[memoryview]) -> None:
        self._store, self._key, self.parts = store, key, parts

    def room(self, offset: int, length_bytes: int) -> None:
        raise AssertionError("all of it is lent")

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        raise AssertionError("all of it is lent")

    def complete(self, total_bytes: int | None = None) -> None:
        self._store.put_if_absent(self._key, b"".join(self.parts))
        self._store.sent()

    def abort(self) -> None:
        self._store.aborted += 1


class TakingLent(ForwardingStore):
    """A store of whole objects that takes lent memory."""

    def __init__(self, sent: Callable[[], object] = lambda: None) -> None:
        super().__init__(MemoryStore(uuid.uuid4().hex, object_bytes_max=1 << 20))
        self.sent, self.aborted = sent, 0
        self.lent: list[LentParts] = []

    def lent_upload(self, key: str, parts: Sequence[memoryview]) -> Upload:
        self.lent.append(LentParts(self, key, list(parts)))
        return self.lent[-1]


@pytest.mark.parametrize("is_later", (False, True))
@pytest.mark.parametrize("sizes", (SIZES, [9 * PAGE_BYTES], [5000, 8193, 4097, 20, 0, 3]))
def test_an_awaited_save_sends_large_pieces_from_where_they_are(sizes: list[int], is_later: bool) -> None:
    store, shards, counts = TakingLent(), shards_of(sizes), list[int]()
    sources, pack = [each.source for each in shards], planned(shards)
    with Completions() as completions:
        written = PackWriter(store, CHOSEN).write(pack, sources, counts.append, completions if is_later else None)
    (upload,) = store.lent
    arrays = [each.source.array for each in shards if each.source.array.nbytes > PAGE_BYTES]  # type: ignore[attr-defined]
    assert {array.ctypes.data for array in arrays} <= {address(part) for part in upload.parts}
    assert store.get(KEY, 1 << 20) == whole(sizes)
    assert counts == [pack.bytes]
    copied = PackWriter(memory(), CHOSEN).write(pack, sources)
    assert (written.record, written.digests) == (copied.record, copied.digests)


@pytest.mark.parametrize("sizes", ([20] * 50, [5000, 3000, 3000], [0]))
def test_what_is_mostly_small_is_copied(sizes: list[int]) -> None:
    store, shards = TakingLent(), shards_of(sizes)
    PackWriter(store, CHOSEN).write(planned(shards), [each.source for each in shards])
    assert not store.lent
    assert store.get(KEY, 1 << 20) == whole(sizes)


@pytest.mark.parametrize("is_later", (False, True))
def test_a_piece_that_changes_while_it_is_sent_fails_the_save(is_later: bool) -> None:
    """The digest would not be of what is stored: the checkpoint could be committed, and never be loaded."""
    shards = shards_of(SIZES)
    array = shards[3].source.array  # type: ignore[attr-defined]

    def change() -> None:
        array[-1] ^= 1

    store = TakingLent(change)
    with pytest.raises(InvalidError, match=r"t3: changed while it was saved"), Completions() as completions:
        sources = [each.source for each in shards]
        PackWriter(store, CHOSEN).write(planned(shards), sources, None, completions if is_later else None)


def test_a_count_of_what_is_not_finite_is_the_same_for_lent_memory() -> None:
    state = {"a": GlobalTensor("float32", np.array([1.0, np.nan] * 3000, np.float32))}
    (shard,) = NumpyFramework(0).collect(state, Selection()).shards
    counting = replace(CHOSEN, count_nonfinite=True)
    for store in (TakingLent(), memory()):
        assert PackWriter(store, counting).write(planned([shard]), [shard.source]).nonfinite == {"a": 3000}


def test_a_sampled_pack_is_still_sent_from_where_it_is() -> None:
    """Samples come out of the pieces themselves, and a meter counts what is sent."""
    kind = Kind("uint8", "parameter")
    store, shards = TakingLent(), shards_of(SIZES)
    kinds, taken = {"t3": kind, "t7": kind}, list[tuple[str, bytes]]()

    def prepare(item: PackItem, raw: memoryview) -> Callable[[], tuple[str, int]]:
        taken.append((item.tensor.fqn, bytes(raw)))
        return lambda: ("", len(raw))

    meter = SaveMeter(SystemClock(), kinds)
    probe = ChunkProbe(meter, kinds, {kind: Sampling(9, 0, 1, 1, PAGE_BYTES)}, prepare)
    pack, sources = planned(shards), [each.source for each in shards]
    PackWriter(store, CHOSEN).measured_by(meter, probe).write(pack, sources)
    assert len(store.lent) == 1 and store.get(KEY, 1 << 20) == whole()
    assert {fqn for fqn, _ in taken} == {"t3", "t7"}
    arrays = {f"t{number}": each.source.array.tobytes() for number, each in enumerate(shards)}  # type: ignore[attr-defined]
    assert all(data and data in arrays[fqn] for fqn, data in taken)
    measured = meter.measured()
    assert measured.probed[kind].raw_bytes == sum(len(data) for _, data in taken)
    assert measured.written_bytes == pack.bytes and measured.write_seconds > 0


def test_a_source_that_breaks_off_in_its_own_copy_begins_no_upload() -> None:
    store, shards = TakingLent(), shards_of(SIZES)

    class Breaks:
        def memory(self, *_: object) -> None:
            return None

        def copy_together(self, *_: object) -> None:
            raise UnavailableError("the device is gone")

    sources = [each.source for each in shards]
    pack = planned(shards)
    first_small = next(item for item in pack.plan.items if 0 < item.bytes <= PAGE_BYTES)
    sources[first_small.shard_number] = Breaks()  # type: ignore[call-overload]
    with pytest.raises(UnavailableError, match="gone"):
        PackWriter(store, CHOSEN).write(pack, sources)
    assert not store.lent and list(store.list()) == []


def test_a_source_that_fails_in_the_memory_of_the_store_leaves_nothing() -> None:
    store, shards = memory(), shards_of(SIZES)

    class Breaks:
        def copy_into(self, *_: object) -> None:
            raise UnavailableError("the device is gone")

    sources = [each.source for each in shards]
    sources[3] = Breaks()  # type: ignore[call-overload]
    writer = PackWriter(store, CHOSEN)
    with pytest.raises(UnavailableError, match="gone"):
        writer.write(planned(shards), sources)
    assert list(store.list()) == []
    writer.write(planned(shards), [each.source for each in shards])
    assert store.get(KEY, 1 << 20) == whole()


def test_staged_windows_are_sent_as_they_are() -> None:
    store, shards = Wrapping(Keeping), shards_of(SIZES)
    pack = planned(shards)
    arena = arena_for(pack, CHOSEN)
    staging = Staging(arena)
    staging.copy([pack], [each.source for each in shards])
    PackWriter(store, CHOSEN).write_staged(pack, staging)
    (upload,) = store.uploads
    assert isinstance(upload, Keeping)
    assert upload.copied == 0
    assert store.get(KEY, 1 << 20) == whole()
    require_all_back(arena)


@pytest.mark.parametrize("is_limit_of_save", (False, True))
def test_an_arena_smaller_than_a_pack_lends_no_window_for_longer_than_its_write(is_limit_of_save: bool) -> None:
    store, shards = Wrapping(Keeping), shards_of(SIZES)
    pack = planned(shards)
    limit = 2 * CHOSEN.window_bytes
    arena = Arena(CHOSEN.window_bytes, 1 << 20 if is_limit_of_save else limit, SystemClock())
    staging = Staging(arena, limit if is_limit_of_save else None)
    copying = threading.Thread(target=staging.copy, args=([pack], [each.source for each in shards]))
    copying.start()
    PackWriter(store, CHOSEN).write_staged(pack, staging)
    copying.join(60.0)
    (upload,) = store.uploads
    assert isinstance(upload, Keeping)
    assert upload.copied == -(-pack.bytes // CHOSEN.window_bytes)
    assert store.get(KEY, 1 << 20) == whole()
    require_all_back(arena)


@pytest.mark.parametrize("name", ("upload.write", "upload.complete"))
def test_windows_come_back_from_an_upload_that_fails(name: str) -> None:
    wrapping, shards = Wrapping(Keeping), shards_of(SIZES)
    faults = Faults(raise_error(UnavailableError), at=3 if name == "upload.write" else 1, names=(name,))
    pack = planned(shards)
    arena = arena_for(pack, CHOSEN)
    staging = Staging(arena)
    staging.copy([pack], [each.source for each in shards])
    with pytest.raises(UnavailableError):
        PackWriter(FaultyStore(wrapping, faults), CHOSEN).write_staged(pack, staging)
    staging.give_up(UnavailableError("as the save does"))
    assert faults.met == 1
    assert list(wrapping.list()) == []
    require_all_back(arena)
