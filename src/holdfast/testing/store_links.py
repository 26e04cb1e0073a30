"""The part of the store suite about objects with several keys, and the fixture of every part."""

# ruff: noqa: D102 -- the name of a test is its sentence.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, InvalidError, MissingError


class StoreFixture:
    """The store that is tested."""

    uploads_hidden: ClassVar[bool] = True
    """False for a store that lists an upload before it is complete."""

    is_asked_for_cached: ClassVar[bool] = True
    """False for a store that caches nothing, and says so without a look at the object."""

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store; override."""
        raise NotImplementedError("override the fixture `store` with one that returns an empty store")


class Links(StoreFixture):
    """Objects with several keys. A store without links returns False and stores nothing."""

    def test_each_key_outlives_what_is_done_to_the_other(self, store: Store) -> None:
        store.put("a/b/c", b"first")
        if not store.link("a/b/c", "new/folder/c"):
            assert [entry.key for entry in store.list()] == ["a/b/c"]
            return
        store.sync("new/folder/")
        assert store.identity("a/b/c") == store.identity("new/folder/c")
        assert {entry.key: entry.bytes for entry in store.list()} == {"a/b/c": 5, "new/folder/c": 5}
        store.put("a/b/c", b"second")
        assert (store.get("a/b/c", 6), store.get("new/folder/c", 5)) == (b"second", b"first")
        assert store.identity("a/b/c") != store.identity("new/folder/c")
        store.delete(["a/b/c"])
        assert store.get("new/folder/c", 5) == b"first"

    def test_linked_twice_is_linked(self, store: Store) -> None:
        store.put("a/b", b"1")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: store.link("a/b", "c/d"), range(8)))
        assert len(set(answers)) == 1

    def test_a_linked_object_is_moved_by_one_key(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.put("c/d", b"damaged")
        if store.link("a/b", "aside/e"):
            store.move("aside/e", "c/d")
            assert store.identity("a/b") == store.identity("c/d")
            assert sorted(entry.key for entry in store.list()) == ["a/b", "c/d"]

    def test_another_object_at_the_new_key_stays(self, store: Store) -> None:
        store.put("a", b"1")
        store.put("b", b"2")
        try:
            assert not store.link("a", "b")
        except ConflictError:
            pass
        assert store.get("b", 1) == b"2"

    @pytest.mark.parametrize("absent", ("none", "none/at/all", "a", "a/b/below"))
    def test_an_absent_object_has_no_key(self, store: Store, absent: str) -> None:
        store.put("a/b", b"1")
        for call in (lambda: store.link(absent, "new/key"), lambda: store.identity(absent)):
            with pytest.raises(MissingError):
                call()
        assert [entry.key for entry in store.list()] == ["a/b"]

    def test_a_bad_key_is_invalid(self, store: Store) -> None:
        store.put("a", b"1")
        for key, new_key in (("../a", "b"), ("a", "../b")):
            with pytest.raises(InvalidError):
                store.link(key, new_key)
