"""The part of the store suite about objects stored in parts."""

# ruff: noqa: D102 -- the name of a test is its sentence.

from __future__ import annotations

import mmap
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.ports.store import Store
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
