"""The suite that every store must pass."""

# ruff: noqa: D102 -- the name of a test is its sentence.

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from holdfast.base.ports.ranges import view_for_range
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES
from holdfast.testing.store_links import Links, StoreFixture
from holdfast.testing.store_uploads import (
    PART_BYTES,
    TOTALS,
    LentObjects,
    Rooms,
    Sizes,
    Uploads,
    aligned_buffer,
    fill,
    keys,
)

BAD_KEYS = (
    "", "/", "/a", "a/", "a//b", ".", "..", "../x", "a/../b", ".hidden", "a/.tmp-1", "a\0", "a\n", "a b", "ä", "a\\b",
    "x" * 129, "/".join(["x" * 100] * 20),
)  # fmt: skip
BAD_PREFIXES = ("a", "/", "../", "a//", ".hidden/", "a\0/")


def read(store: Store, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Read ranges into one buffer each."""
    views = [
        view_for_range(aligned_buffer(stop - start), start, stop, store.traits.read_alignment) for start, stop in ranges
    ]
    store.read_into(key, ranges, views)
    return [bytes(view) for view in views]


def taken_one_by_one(store: Store, key: str, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> list[bytes]:
    """Read ranges through the same buffer, in order."""
    came: list[bytes] = []

    def take(number: int, view: memoryview) -> None:
        assert number == len(came)
        came.append(bytes(view))

    store.read_into(
        key, ranges, [view_for_range(buffer, *bounds, store.traits.read_alignment) for bounds in ranges], take
    )
    return came


class SmallObjects(StoreFixture):
    """Objects stored and read whole."""

    @pytest.mark.parametrize("total", TOTALS)
    def test_put_gives_back_the_same_bytes(self, store: Store, total: int) -> None:
        data = random.Random(total).randbytes(total)
        store.put("folder/key", data)
        found = store.get("folder/key", total)
        assert found == data and isinstance(found, bytes)
        assert store.size("folder/key") == total

    def test_put_replaces(self, store: Store) -> None:
        store.put("key", b"longer before")
        store.put("key", b"after")
        assert store.get("key", 100) == b"after"
        assert keys(store) == ["key"]

    def test_put_that_need_not_last_is_read_and_replaced_like_any(self, store: Store) -> None:
        store.put("a/key", b"first", durable=False)
        assert store.get("a/key", 5) == b"first"
        store.put("a/key", b"second", durable=False)
        assert store.get("a/key", 6) == b"second"
        assert keys(store) == ["a/key"]

    def test_put_if_absent_never_replaces(self, store: Store) -> None:
        store.put_if_absent("folder/key", b"first")
        with pytest.raises(ConflictError, match="folder/key"):
            store.put_if_absent("folder/key", b"second")
        assert store.get("folder/key", 100) == b"first"
        assert keys(store) == ["folder/key"]

    def test_objects_whose_folders_are_synced_later_are_stored_like_any(self, store: Store) -> None:
        store.put_if_absent("folder/parts/key", b"first", folders_durable=False)
        with pytest.raises(ConflictError, match="folder/parts/key"):
            store.put_if_absent("folder/parts/key", b"second", folders_durable=False)
        upload = store.upload("folder/pack", 5, PART_BYTES, folders_durable=False)
        upload.write(0, memoryview(b"whole"))
        upload.complete()
        store.sync("folder/parts/")
        assert store.get("folder/parts/key", 100) == b"first"
        assert store.get("folder/pack", 100) == b"whole"
        assert keys(store) == ["folder/pack", "folder/parts/key"]

    def test_replace_takes_the_place_of_what_was_seen_alone(self, store: Store) -> None:
        store.replace("a/key", b"first", None)
        store.replace("a/key", b"first", None)
        for seen in (None, b"other", b"firs", b"first and more"):
            with pytest.raises(ConflictError, match="a/key"):
                store.replace("a/key", b"third", seen)
        store.replace("a/key", b"second, and longer", b"first", durable=False)
        assert store.get("a/key", 100) == b"second, and longer"
        with pytest.raises(ConflictError, match="a/key"):
            store.replace("a/key", b"1", b"first")
        with pytest.raises(ConflictError, match="none"):
            store.replace("none", b"1", b"first")
        assert keys(store) == ["a/key"]

    def test_put_if_absent_tells_who_won(self, store: Store) -> None:
        def race(number: int) -> bool:
            try:
                store.put_if_absent("deep/er/key", b"%d" % number * 1000)
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(race, range(16)))
        assert won.count(True) == 1
        assert store.get("deep/er/key", 1 << 20) == b"%d" % won.index(True) * 1000
        assert keys(store) == ["deep/er/key"]

    def test_absent_key_is_missing(self, store: Store) -> None:
        store.put("there/key", b"")
        for key in ("key", "there", "there/other", "there/key/below", "no/where/key"):
            with pytest.raises(MissingError, match=key):
                store.get(key, 100)
            with pytest.raises(MissingError, match=key):
                store.size(key)
            with pytest.raises(MissingError, match=key):
                read(store, key, [(0, 0)])

    def test_object_larger_than_allowed_is_corrupt(self, store: Store) -> None:
        store.put("key", b"12345")
        assert store.get("key", 5) == b"12345"
        with pytest.raises(CorruptError, match="key"):
            store.get("key", 4)

    @pytest.mark.parametrize("key", BAD_KEYS, ids=ascii)
    def test_bad_key_is_invalid(self, store: Store, key: str) -> None:
        calls = (
            lambda: store.put(key, b""),
            lambda: store.put_if_absent(key, b""),
            lambda: store.upload(key, 0, PAGE_BYTES),
            lambda: store.size(key),
            lambda: store.get(key, 100),
            lambda: store.read_into(key, [], []),
            lambda: store.delete([key]),
        )
        for call in calls:
            with pytest.raises(InvalidError, match="key"):
                call()
        assert keys(store) == []

    def test_longest_key_part(self, store: Store) -> None:
        key = "x" * 128 + "/A-z_0.9"
        store.put(key, b"1")
        assert keys(store) == [key]


class Ranges(StoreFixture):
    """Reading parts of an object."""

    @pytest.mark.parametrize("total", TOTALS)
    def test_every_edge(self, store: Store, total: int) -> None:
        data = random.Random(total).randbytes(total)
        fill(store, "key", data)
        edges = [edge for edge in (0, 1, 4095, 4096, 4097, PART_BYTES, total - 1, total) if 0 <= edge <= total]
        ranges = [(start, stop) for start, stop in itertools.product(edges, edges) if start <= stop]
        assert read(store, "key", ranges) == [data[start:stop] for start, stop in ranges]

    def test_anywhere(self, store: Store) -> None:
        seed = random.randrange(1 << 32)
        chance = random.Random(seed)
        data = chance.randbytes(9 * PART_BYTES + 1234)
        fill(store, "folder/key", data)
        for _ in range(50):
            bounds = [sorted(chance.choices(range(len(data) + 1), k=2)) for _ in range(chance.randrange(5))]
            ranges = [(start, stop) for start, stop in bounds]
            expected = [data[start:stop] for start, stop in ranges]
            assert read(store, "folder/key", ranges) == expected, f"seed {seed}, ranges {ranges}"

    @pytest.mark.parametrize("shift", (0, 1, 77, 512, 4095))
    def test_any_memory_is_filled_and_nothing_beside_it(self, store: Store, shift: int) -> None:
        data = random.Random(shift).randbytes(3 * PART_BYTES)
        fill(store, "key", data)
        for start, stop in ((0, 1), (1, 4097), (4095, 4097), (10, 3 * PART_BYTES - 1), (PAGE_BYTES, PART_BYTES)):
            memory = aligned_buffer(stop - start + shift)
            view = memory[shift : shift + stop - start]
            store.read_into("key", [(start, stop)], [view])
            assert view == data[start:stop]
            assert not any(memory[:shift]) and not any(memory[shift + stop - start :])

    def test_alignment_is_a_power_of_two_of_a_page_at_most(self, store: Store) -> None:
        assert store.traits.read_alignment in [1 << power for power in range(PAGE_BYTES.bit_length())]

    def test_ranges_may_come_one_by_one_through_the_same_slab(self, store: Store) -> None:
        seed = random.randrange(1 << 32)
        chance = random.Random(seed)
        data = chance.randbytes(9 * PART_BYTES + 1234)
        fill(store, "folder/key", data)
        buffer = aligned_buffer(len(data))
        for _ in range(50):
            bounds = [sorted(chance.choices(range(len(data) + 1), k=2)) for _ in range(chance.randrange(5))]
            ranges = [(start, stop) for start, stop in bounds]
            came = taken_one_by_one(store, "folder/key", ranges, buffer)
            assert came == [data[start:stop] for start, stop in ranges], f"seed {seed}, ranges {ranges}"

    def test_a_buffer_that_was_handed_over_is_not_touched_again(self, store: Store) -> None:
        data = random.Random(0).randbytes(9 * PART_BYTES)
        fill(store, "key", data)
        ranges = [(start, start + PART_BYTES) for start in range(0, len(data), PART_BYTES)]
        buffers = [
            view_for_range(aligned_buffer(2 * PART_BYTES), *bounds, store.traits.read_alignment) for bounds in ranges
        ]
        handed_over: list[memoryview] = []

        def take(number: int, view: memoryview) -> None:
            start, stop = ranges[number]
            assert view == data[start:stop]
            if np.shares_memory(view, buffers[number]):
                handed_over.append(buffers[number])
                buffers[number][:] = bytes(PART_BYTES)

        store.read_into("key", ranges, buffers, take)
        assert all(buffer == bytes(PART_BYTES) for buffer in handed_over)

    def test_what_takes_a_range_may_end_the_reading(self, store: Store) -> None:
        store.put("key", b"0123456789")
        came: list[int] = []

        def refuse(number: int, view: memoryview) -> None:
            came.append(number)
            raise CorruptError("not what was saved")

        buffer = aligned_buffer(10)
        with pytest.raises(CorruptError, match="not what was saved"):
            store.read_into("key", [(0, 5), (5, 10)], [buffer[:5], buffer[:5]], refuse)
        assert came == [0]

    @pytest.mark.parametrize("bounds", ((0, 4098), (4097, 4098), (1 << 40, (1 << 40) + 1)))
    def test_beyond_the_end_is_corrupt_and_nothing_is_read(self, store: Store, bounds: tuple[int, int]) -> None:
        store.put("folder/key", b"1" * 4097)
        buffers = [aligned_buffer(4097)[:4097], aligned_buffer(5000)[: bounds[1] - bounds[0]]]
        with pytest.raises(CorruptError, match=rf"folder/key.*\[{bounds[0]}, {bounds[1]}\).*4097"):
            store.read_into("folder/key", [(0, 4097), bounds], buffers)
        assert not any(buffers[0])

    def test_wrong_calls_are_invalid(self, store: Store) -> None:
        store.put("key", b"1" * 100)
        with pytest.raises(InvalidError, match="start <= stop"):
            store.read_into("key", [(5, 4)], [aligned_buffer(10)])
        with pytest.raises(InvalidError, match="start <= stop"):
            store.read_into("key", [(-1, 4)], [aligned_buffer(10)])
        with pytest.raises(InvalidError, match="one buffer per range"):
            store.read_into("key", [(0, 4)], [])
        for length in (0, 99, 101):
            with pytest.raises(InvalidError, match=f"{length} bytes .*of 100 bytes"):
                store.read_into("key", [(0, 100)], [aligned_buffer(length)[:length]])
        with pytest.raises(InvalidError, match="writable"):
            store.read_into("key", [(0, 1)], [memoryview(bytes(1))])

    @pytest.mark.parametrize("seed", range(3))
    def test_what_is_at_hand_fills_the_buffers_from_the_front(self, store: Store, seed: int) -> None:
        chance = random.Random(seed)
        data = chance.randbytes(9 * PART_BYTES + 1234)
        fill(store, "folder/key", data)
        read(store, "folder/key", [(0, len(data))])
        for _ in range(50):
            start, stop = sorted(chance.choices(range(len(data) + 1), k=2))
            cuts = [start, *sorted(chance.choices(range(start, stop + 1), k=chance.randrange(5))), stop]
            buffers = [memoryview(bytearray(end - begin)) for begin, end in itertools.pairwise(cuts)]
            reported = bytearray()
            count = store.get_cached("folder/key", start, buffers, reported.extend)
            assert 0 <= count <= stop - start
            assert reported == data[start : start + count], f"seed {seed}, cuts {cuts}"
            assert b"".join(buffers)[:count] == data[start : start + count], f"seed {seed}, cuts {cuts}"

    def test_asking_for_what_is_at_hand_in_a_wrong_way(self, store: Store) -> None:
        store.put("folder/key", b"1" * 4097)
        buffer = memoryview(bytearray(4096))
        if self.is_asked_for_cached:
            with pytest.raises(MissingError, match="no-such"):
                store.get_cached("folder/no-such", 0, [buffer])
            with pytest.raises(CorruptError, match=r"folder/key.*\[2, 4098\).*4097"):
                store.get_cached("folder/key", 2, [buffer])
        else:
            assert store.get_cached("folder/no-such", 0, [buffer]) == store.get_cached("folder/key", 2, [buffer]) == 0
        with pytest.raises(InvalidError, match="start <= stop"):
            store.get_cached("folder/key", -1, [buffer])
        with pytest.raises(InvalidError, match="writable"):
            store.get_cached("folder/key", 0, [memoryview(bytes(8))])
        assert not any(buffer)

    def test_many_threads_read_at_once(self, store: Store) -> None:
        data = random.Random(1).randbytes(4 * PART_BYTES)
        fill(store, "key", data)
        bounds = [(start, start + 5000) for start in range(0, 3 * PART_BYTES, 1111)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda bound: read(store, "key", [bound])[0], bounds))
        assert found == [data[start:stop] for start, stop in bounds]


class Listings(StoreFixture):
    """Finding and removing objects."""

    def test_list(self, store: Store) -> None:
        sizes = {"a": 1, "b/c": 2, "b/d/e": 3, "b2/c": 0}
        for key, total in sizes.items():
            store.put(key, bytes(total))
        assert {entry.key: entry.bytes for entry in store.list()} == sizes
        assert keys(store, "b/") == ["b/c", "b/d/e"]
        assert keys(store, "b/d/") == ["b/d/e"]
        assert keys(store, "a/") == []
        assert keys(store, "none/at/all/") == []

    def test_keys_come_in_their_order(self, store: Store) -> None:
        names = ("b/c", "b-c", "b.c", "b/c-d", "b0", "b/c.d/e", "b/c0", "B/c", "b/d/e", "b/d-e", "b/d", "_", "9", "b_")
        stored = [name + "/z" for name in names]
        for key in stored:
            store.put(key, b"", durable=False)
        assert [entry.key for entry in store.list()] == sorted(stored)
        assert [entry.key for entry in store.list("b/")] == sorted(key for key in stored if key.startswith("b/"))

    def test_parts_of_a_listing_make_up_the_whole(self, store: Store) -> None:
        seed = random.randrange(1 << 32)
        chance = random.Random(seed)
        names = {"/".join(chance.choices(("a", "b", "a-", "b0"), k=chance.randrange(1, 4))) + "/x" for _ in range(40)}
        for key in names:
            store.put(key, b"1", durable=False)
        for prefix in ("", "a/"):
            whole = sorted(key for key in names if key.startswith(prefix))
            cuts = sorted(chance.sample([*names, "", "a", "a/a", "b0/", "zz"], 6))
            parts = [
                [entry.key for entry in store.list(prefix, after=after, up_to=up_to)]
                for after, up_to in itertools.pairwise(["", *cuts, None])
                if after is not None
            ]
            assert list(itertools.chain(*parts)) == whole, f"seed {seed}, cuts {cuts}"
            for number, key in enumerate(whole):
                assert [entry.key for entry in store.list(prefix, after=key)] == whole[number + 1 :]

    def test_more_objects_than_a_page_or_a_request_holds(self, store: Store) -> None:
        names = [f"many/{number:05d}" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"1", durable=False), names))
        assert [entry.key for entry in store.list("many/")] == names
        assert [entry.key for entry in store.list(after=names[49], up_to=names[1060])] == names[50:1061]
        store.delete([*names, "many/none", names[0]])
        assert keys(store) == []

    def test_folders(self, store: Store) -> None:
        assert store.folders() == []
        for key in ("a", "z/c", "b/d/e", "b/f/g/h", "b/i"):
            store.put(key, b"")
        assert store.folders() == ["b", "z"]
        assert store.folders("b/") == ["d", "f"]
        assert store.folders("b/d/") == []
        assert store.folders("none/") == []

    @pytest.mark.parametrize("prefix", BAD_PREFIXES, ids=ascii)
    def test_bad_prefix_is_invalid(self, store: Store, prefix: str) -> None:
        for call in (store.list, store.folders):
            with pytest.raises(InvalidError):
                call(prefix)

    def test_delete(self, store: Store) -> None:
        for key in ("a", "b/c", "b/d", "b/e/f"):
            store.put(key, b"1")
        store.delete(["b/c", "b/e/f", "b/none", "none/none", "b", "a/below"])
        assert keys(store) == ["a", "b/d"]
        with pytest.raises(MissingError):
            store.get("b/c", 1)
        store.delete(iter(["a", "b/d"]))
        store.delete([])
        assert keys(store) == []
        store.put_if_absent("b/c", b"anew")
        assert store.get("b/c", 4) == b"anew"

    def test_move(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.move("a/b/c", "new/folder/c")
        store.put_if_absent("a/b/c", b"anew")
        assert (store.get("a/b/c", 4), store.get("new/folder/c", 1)) == (b"anew", b"1")
        for absent in ("none", "none/at/all", "a/b", "a/b/c/below"):
            with pytest.raises(MissingError):
                store.move(absent, "new/key")
        assert keys(store) == ["a/b/c", "new/folder/c"]

    def test_writers_beside_movers_lose_nothing(self, store: Store) -> None:
        def write(number: int) -> int:
            for turn in range(5):
                with suppress(MissingError):
                    store.put_if_absent(f"a/{number}-{turn}", b"1")
                    store.move(f"a/{(number + 1) % 4}-{turn}", f"b/{number}-{turn}")
            return 5

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(write, range(4))) == len(keys(store))

    def test_writers_beside_deleters(self, store: Store) -> None:
        def write(number: int) -> None:
            for turn in range(20):
                key = f"shared/folder/{number}-{turn}"
                store.put_if_absent(key, b"1")
                fill(store, f"{key}-up", b"22")
                assert store.get(key, 1) == b"1"
                store.delete([key, f"{key}-up"])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert keys(store) == []


class StoreSuite(SmallObjects, Uploads, Rooms, LentObjects, Sizes, Ranges, Listings, Links):
    """Every promise of `Store`.

    Subclass it in a test module and override the fixture `store`. If the store lists uploads before they are complete,
    set `uploads_hidden = False`. If it caches nothing, and says so without a look, set `is_asked_for_cached = False`.
    """
