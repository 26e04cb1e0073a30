"""Memory that stores and the engine lend to each other: rooms and pieces of awaited saves, windows of staged ones."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import numpy as np
import pytest

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import Release
from holdfast.base.ports.store import Upload
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.writing.write import PackWriter
from holdfast.errors import UnavailableError
from holdfast.settings import PAGE_BYTES
from tests.doubles.faults import Faults, FaultyStore, raise_error
from tests.support.tuning import tuned
from tests.unit.core.engine.test_write_and_read import (
    KEY,
    SMALL,
    arena_for,
    memory,
    planned,
    require_all_back,
    shards_of,
)

CHOSEN = tuned(SMALL, window_bytes=2 * PAGE_BYTES, windows_in_flight=3)
SIZES = [5000, 0, 20, 9 * PAGE_BYTES, 20, 4096, 3000, 8193, 0]


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def whole(sizes: list[int] = SIZES) -> bytes:
    """What is stored without any lending, by one window."""
    store, shards = memory(), shards_of(sizes)
    PackWriter(store, tuned(CHOSEN, window_bytes=1 << 20)).write(planned(shards), [each.source for each in shards])
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
    limit = 2 * CHOSEN._tuning.window_bytes
    arena = Arena(CHOSEN._tuning.window_bytes, 1 << 20 if is_limit_of_save else limit, SystemClock())
    staging = Staging(arena, limit if is_limit_of_save else None)
    copying = threading.Thread(target=staging.copy, args=([pack], [each.source for each in shards]))
    copying.start()
    PackWriter(store, CHOSEN).write_staged(pack, staging)
    copying.join(60.0)
    (upload,) = store.uploads
    assert isinstance(upload, Keeping)
    assert upload.copied == -(-pack.bytes // CHOSEN._tuning.window_bytes)
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
