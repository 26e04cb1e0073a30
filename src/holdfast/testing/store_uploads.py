"""The part of the store suite about objects stored in parts."""

# ruff: noqa: D102 -- the name of a test is its sentence.

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from holdfast.base.ports.store import Store, Upload
from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES
from holdfast.testing.store_links import StoreFixture

PART_BYTES = 2 * PAGE_BYTES
TOTALS = (0, 1, 4095, 4096, 4097, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES, 5 * PART_BYTES + 4095)


def aligned_buffer(range_bytes: int) -> memoryview:
    """Return zeroed, page-aligned memory for a range of this length, as `view_for_range` takes it."""
    return memoryview(mmap.mmap(-1, range_bytes + 2 * PAGE_BYTES))


def fill(store: Store, key: str, data: bytes, *, part_bytes: int = PART_BYTES, threads: int = 1) -> None:
    """Upload `data` whole, last part first, from `threads` threads."""
    upload = store.upload(key, len(data), part_bytes)
    offsets = range(0, len(data), part_bytes)[::-1]
    with ThreadPoolExecutor(threads) as pool:
        parts = [memoryview(data)[offset : offset + part_bytes] for offset in offsets]
        list(pool.map(upload.write, offsets, parts))
    upload.complete()


def keys(store: Store, prefix: str = "") -> list[str]:
    """Return the keys under a prefix, sorted."""
    return sorted(entry.key for entry in store.list(prefix))


class Uploads(StoreFixture):
    """Objects stored in parts."""

    @pytest.mark.parametrize("threads", (1, 4))
    @pytest.mark.parametrize("total", TOTALS)
    def test_parts_in_any_order(self, store: Store, total: int, threads: int) -> None:
        data = random.Random(total).randbytes(total)
        fill(store, "folder/key", data, threads=threads)
        assert store.size("folder/key") == total
        assert store.get("folder/key", total) == data

    @pytest.mark.parametrize("shift", (0, 1, 512))
    def test_parts_in_aligned_and_other_memory(self, store: Store, shift: int) -> None:
        total = PART_BYTES + 5
        buffer = aligned_buffer(total + shift)[shift : shift + total]
        buffer[:] = random.Random(shift).randbytes(total)
        upload = store.upload("key", total, PART_BYTES)
        upload.write(PART_BYTES, buffer[PART_BYTES:])
        upload.write(0, buffer[:PART_BYTES])
        upload.complete()
        assert store.get("key", total) == bytes(buffer)

    def test_memory_may_be_reused_once_written(self, store: Store) -> None:
        buffer = aligned_buffer(0)
        upload = store.upload("key", 2 * PART_BYTES, PART_BYTES)
        for number in (1, 2):
            buffer[:] = bytes([number]) * PART_BYTES
            upload.write((number - 1) * PART_BYTES, buffer)
        buffer[:] = bytes(PART_BYTES)
        upload.complete()
        assert store.get("key", 1 << 20) == b"\1" * PART_BYTES + b"\2" * PART_BYTES

    def test_existing_key_is_conflict(self, store: Store) -> None:
        store.put("folder/key", b"first")
        with pytest.raises(ConflictError, match="folder/key"):
            upload = store.upload("folder/key", 5, PAGE_BYTES)
            upload.write(0, memoryview(b"later"))
            upload.complete()
        assert store.get("folder/key", 100) == b"first"

    def test_one_of_two_uploads_wins_and_the_other_leaves_no_mark(self, store: Store) -> None:
        first = store.upload("key", 5, PAGE_BYTES)
        first.write(0, memoryview(b"first"))
        with pytest.raises(ConflictError):
            second = store.upload("key", 6, PAGE_BYTES)
            second.write(0, memoryview(b"second"))
            first.complete()
            try:
                second.complete()
            finally:
                second.abort()
        # A store that refuses at the beginning has not completed the first one yet.
        if not self.uploads_hidden:
            first.complete()
        assert store.get("key", 100) == b"first"
        assert keys(store) == ["key"]

    def test_before_complete_it_is_hidden_or_can_be_deleted(self, store: Store) -> None:
        upload = store.upload("folder/key", 5, PAGE_BYTES)
        upload.write(0, memoryview(b"12345"))
        if not self.uploads_hidden:
            assert keys(store) == ["folder/key"]
            store.delete(["folder/key"])
            assert keys(store) == []
            upload.abort()
            return
        assert keys(store) == []
        with pytest.raises(MissingError):
            store.get("folder/key", 100)
        upload.complete()
        assert keys(store) == ["folder/key"]

    @pytest.mark.parametrize("written", (0, 1, 3))
    def test_abort_leaves_nothing(self, store: Store, written: int) -> None:
        store.put("other", b"1")
        upload = store.upload("folder/key", 3 * PART_BYTES, PART_BYTES)
        for number in range(written):
            upload.write(number * PART_BYTES, memoryview(bytes(PART_BYTES)))
        upload.abort()
        upload.abort()
        assert keys(store) == ["other"]
        assert store.folders() == []
        with pytest.raises(MissingError):
            store.size("folder/key")
        with pytest.raises(InvalidError):
            upload.complete()
        with pytest.raises(InvalidError):
            upload.write(0, memoryview(bytes(PART_BYTES)))
        fill(store, "folder/key", b"anew")
        assert store.get("folder/key", 4) == b"anew"

    def test_abort_after_complete_does_nothing(self, store: Store) -> None:
        upload = store.upload("key", 1, PAGE_BYTES)
        upload.write(0, memoryview(b"1"))
        upload.complete()
        upload.abort()
        assert store.get("key", 1) == b"1"

    def test_missing_part_is_not_completed(self, store: Store) -> None:
        upload = store.upload("key", 2 * PART_BYTES, PART_BYTES)
        upload.write(PART_BYTES, memoryview(bytes(PART_BYTES)))
        with pytest.raises(InvalidError, match="1 of 2"):
            upload.complete()
        upload.abort()
        assert keys(store) == []

    @pytest.mark.parametrize(
        ("offset", "length"),
        (
            (1, PART_BYTES),
            (PAGE_BYTES, PART_BYTES),
            (0, 0),
            (PART_BYTES, 11),
            (-PART_BYTES, PART_BYTES),
            (2 * PART_BYTES, 10),
            (0, 2 * PART_BYTES),
        ),
    )
    def test_what_is_no_part_is_invalid(self, store: Store, offset: int, length: int) -> None:
        upload = store.upload("key", PART_BYTES + 10, PART_BYTES)
        with pytest.raises(InvalidError, match="part"):
            upload.write(offset, memoryview(bytes(length)))
        upload.abort()

    @pytest.mark.parametrize(("total", "part"), ((-1, PAGE_BYTES), (1, 0), (1, PAGE_BYTES + 1), (1, -PAGE_BYTES)))
    def test_bad_sizes_are_invalid(self, store: Store, total: int, part: int) -> None:
        with pytest.raises(InvalidError, match="part_bytes"):
            store.upload("key", total, part)
        assert keys(store) == []


class Rooms(StoreFixture):
    """Memory that a store and its caller lend to each other. A store without memory of its own returns None."""

    @pytest.mark.parametrize("every", (1, 2))
    @pytest.mark.parametrize("total", TOTALS)
    def test_rooms_take_the_bytes_of_their_parts(self, store: Store, total: int, every: int) -> None:
        data = random.Random(total).randbytes(total)
        upload = store.upload("folder/key", total, PART_BYTES)
        for offset in reversed(range(0, total, PART_BYTES)):
            part = memoryview(data)[offset : offset + PART_BYTES]
            room = upload.room(offset, len(part)) if offset // PART_BYTES % every == 0 else None
            if room is not None:
                assert room.nbytes == len(part)
                room[:] = part
                again = upload.room(offset, len(part))
                assert again == part, "until it is written, a part has one room"
            upload.write(offset, part if room is None else room)
        upload.complete()
        assert store.get("folder/key", total) == data

    def test_what_is_no_part_has_no_room(self, store: Store) -> None:
        upload = store.upload("key", PART_BYTES + 10, PART_BYTES)
        for offset, length in ((1, PART_BYTES), (0, PART_BYTES + 1), (PART_BYTES, 11), (2 * PART_BYTES, 1), (0, 0)):
            with suppress(InvalidError):
                assert upload.room(offset, length) is None
        upload.abort()
        with suppress(InvalidError):
            assert upload.room(0, PART_BYTES) is None

    def test_an_abandoned_room_leaves_nothing(self, store: Store) -> None:
        upload = store.upload("key", PART_BYTES, PART_BYTES)
        room = upload.room(0, PART_BYTES)
        if room is not None:
            room[:] = b"1" * PART_BYTES
        with pytest.raises(InvalidError, match="0 of 1"):
            upload.complete()
        upload.abort()
        assert keys(store) == []

    def test_released_memory_is_the_callers_again(self, store: Store) -> None:
        seed = random.randrange(1 << 32)
        data = random.Random(seed).randbytes(4 * PART_BYTES + 77)
        upload = store.upload("key", len(data), PART_BYTES)
        lent = _Lent(data)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda offset: lent.write(upload, offset), range(0, len(data), PART_BYTES)))
        upload.complete()
        lent.require_all_back()
        assert store.get("key", len(data)) == data, f"seed {seed}"

    def test_memory_comes_back_from_an_upload_that_ends_badly(self, store: Store) -> None:
        data = bytes(3 * PART_BYTES)
        upload = store.upload("key", len(data), PART_BYTES)
        lent = _Lent(data)
        lent.write(upload, PART_BYTES)
        with pytest.raises(InvalidError, match="1 of 3"):
            upload.complete()
        upload.abort()
        with pytest.raises(InvalidError):
            lent.write(upload, 0)
        lent.require_all_back()
        upload = store.upload("key", len(data), PART_BYTES)
        with pytest.raises(InvalidError, match="part"):
            lent.write(upload, 2 * PART_BYTES + 1)
        lent.require_all_back()
        upload.abort()
        assert keys(store) == []


class LentObjects(StoreFixture):
    """Objects that lie in memory of the caller. A store that takes only parts says so, and stores nothing."""

    def lent_upload(self, store: Store, parts: Sequence[memoryview]) -> Upload | None:
        upload = store.lent_upload("folder/key", parts)
        assert keys(store) == [], "nothing is stored before it is complete"
        return upload

    @pytest.mark.parametrize("sizes", ((1,), (4096, 0, 3), (1, PART_BYTES + 1, 5 * PART_BYTES)))
    def test_lent_parts_are_stored_one_after_the_other(self, store: Store, sizes: tuple[int, ...]) -> None:
        data = [random.Random(size).randbytes(size) for size in sizes]
        upload = self.lent_upload(store, [memoryview(part) for part in data])
        if upload is None:
            return
        with pytest.raises(InvalidError):
            upload.complete(sum(sizes) + 1)
        upload.complete()
        assert store.get("folder/key", sum(sizes)) == b"".join(data)
        upload.abort()
        assert store.size("folder/key") == sum(sizes)
        with pytest.raises(InvalidError):
            upload.complete()

    def test_lent_memory_is_read_when_the_upload_is_complete(self, store: Store) -> None:
        memory = memoryview(bytearray(b"before"))
        upload = self.lent_upload(store, [memory])
        if upload is None:
            return
        memory[:] = b"behind"
        upload.complete()
        memory[:] = b"change"
        assert store.get("folder/key", 6) == b"behind"

    def test_an_object_of_lent_memory_that_exists_is_not_replaced(self, store: Store) -> None:
        aborted = self.lent_upload(store, [memoryview(b"never")])
        if aborted is None:
            return
        aborted.abort()
        with pytest.raises(InvalidError):
            aborted.complete()
        uploads = [
            self.lent_upload(store, [memoryview(b"own "), memoryview(word)]) for word in (b"old", b"new", b"old")
        ]
        first, other, same = (upload for upload in uploads if upload is not None)
        first.complete()
        with pytest.raises(ConflictError):
            other.complete()
        other.abort()
        same.complete()  # As after a lost reply: these are its bytes.
        assert store.get("folder/key", 7) == b"own old"

    def test_no_part_of_a_lent_object_is_written(self, store: Store) -> None:
        upload = self.lent_upload(store, [memoryview(b"whole")])
        if upload is None:
            return
        assert upload.room(0, 5) is None
        with pytest.raises(InvalidError):
            upload.write(0, memoryview(b"whole"))
        upload.abort()
        assert keys(store) == []


class _Lent:
    """Parts in memory that is overwritten once it is released."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._count = 0
        self._back = threading.Semaphore(0)

    def write(self, upload: Upload, offset: int) -> None:
        memory = memoryview(bytearray(self._data[offset : offset + PART_BYTES]))
        self._count += 1

        def release() -> None:
            memory[:] = b"?" * len(memory)
            self._back.release()

        upload.write(offset, memory, release)

    def require_all_back(self) -> None:
        """Require that every part is released, and once. A request that was abandoned may still read for a while."""
        for _ in range(self._count):
            assert self._back.acquire(timeout=60), "the memory of a part was not released"
        assert not self._back.acquire(blocking=False), "the memory of a part was released twice"
        self._count = 0


class Sizes(StoreFixture):
    """Objects whose size is known at the end."""

    @pytest.mark.parametrize("bytes_max", (5 * PART_BYTES + 4095, 6 * PART_BYTES, 40 * PART_BYTES))
    @pytest.mark.parametrize("total", TOTALS)
    def test_an_object_may_stay_below_what_was_announced(self, store: Store, total: int, bytes_max: int) -> None:
        data = random.Random(total).randbytes(total)
        upload = store.upload("folder/key", bytes_max, PART_BYTES, may_be_less=True)
        for offset in reversed(range(0, total, PART_BYTES)):
            upload.write(offset, memoryview(data)[offset : offset + PART_BYTES])
        upload.complete(total)
        assert store.size("folder/key") == total
        assert store.get("folder/key", total) == data

    def test_the_last_part_may_fill_the_front_of_its_room(self, store: Store) -> None:
        data = random.Random(1).randbytes(PART_BYTES + 77)
        upload = store.upload("key", 9 * PART_BYTES, PART_BYTES, may_be_less=True)
        for offset in (0, PART_BYTES):
            part = memoryview(data)[offset : offset + PART_BYTES]
            room = upload.room(offset, PART_BYTES)
            if room is not None:
                room[: len(part)] = part
                part = room[: len(part)]
            upload.write(offset, part)
        upload.complete(len(data))
        assert store.get("key", len(data)) == data

    @pytest.mark.parametrize(
        ("lengths", "total", "text"),
        (
            ((PART_BYTES - 1,), None, "0 of 2"),
            ((PART_BYTES - 1,), PART_BYTES, "0 of 1"),
            ((PART_BYTES - 1, 10), PART_BYTES + 10, "1 of 2"),
            ((PART_BYTES, 10), PART_BYTES, "1 of 1.*1 others"),
            ((PART_BYTES, 10), PART_BYTES + 9, "1 of 2"),
            ((PART_BYTES, 10), PART_BYTES + 11, "at most"),
            ((PART_BYTES, 10), -1, "at most"),
            ((PART_BYTES,), 0, "0 of 0.*1 others"),
        ),
    )
    def test_parts_that_do_not_make_up_the_size_are_not_completed(
        self, store: Store, lengths: Sequence[int], total: int | None, text: str
    ) -> None:
        upload = store.upload("key", PART_BYTES + 10, PART_BYTES)
        for number, length in enumerate(lengths):
            upload.write(number * PART_BYTES, memoryview(bytes(length)))
        with pytest.raises(InvalidError, match=text):
            upload.complete(total)
        upload.abort()
        assert keys(store) == []

    def test_the_largest_object_is_announced(self, store: Store) -> None:
        largest = store.traits.object_bytes_max
        assert largest is None or largest > 0
