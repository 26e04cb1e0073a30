"""The part of the store suite about names of other systems, for stores that take them."""

# ruff: noqa: D102 -- the name of a test is its sentence.

from __future__ import annotations

import pytest

from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, InvalidError, MissingError
from holdfast.settings import PAGE_BYTES
from holdfast.testing.store_links import StoreFixture

BAD_NAMES = ("", "/", "/a", "a/", "a//b", ".", "..", "../x", "a/../b", "a\0", "a\n", "/".join(["x" * 100] * 20))


class AnyNamesSuite(StoreFixture):
    """Every promise of `Store.with_any_names`; subclass it beside `StoreSuite`."""

    @pytest.fixture
    def named(self, store: Store) -> Store:
        view = store.with_any_names()
        assert view is not None
        return view

    def test_names_of_other_systems_are_stored_and_read(self, named: Store) -> None:
        named.put(".metadata", b"1")
        named.put_if_absent(".work/plan one.json", b"22")
        with pytest.raises(ConflictError):
            named.put_if_absent(".work/plan one.json", b"33")
        upload = named.upload("folder/größe (1).bin", 3, PAGE_BYTES, folders_durable=False)
        upload.write(0, memoryview(b"333"))
        upload.complete()
        assert [(entry.key, entry.bytes) for entry in named.list()] == [
            (".metadata", 1),
            (".work/plan one.json", 2),
            ("folder/größe (1).bin", 3),
        ]
        assert named.get("folder/größe (1).bin", 3) == b"333"
        assert (named.size(".metadata"), named.folders()) == (1, [".work", "folder"])
        named.delete([".metadata"])
        with pytest.raises(MissingError):
            named.size(".metadata")

    def test_a_tag_changes_with_the_content(self, named: Store) -> None:
        def stamp() -> str:
            (entry,) = named.list()
            return entry.tag or named.identity(entry.key)

        named.put(".metadata", b"one")
        first = stamp()
        assert stamp() == first
        named.put(".metadata", b"two")
        assert stamp() != first

    def test_the_store_itself_shows_none_of_them(self, store: Store, named: Store) -> None:
        named.put(".hidden/a b", b"1")
        named.put("shown", b"1")
        assert ([entry.key for entry in store.list()], store.folders()) == (["shown"], [])
        with pytest.raises(InvalidError):
            store.size(".hidden/a b")

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_a_name_that_leads_elsewhere_is_refused(self, named: Store, name: str) -> None:
        for call in (named.size, lambda key: named.get(key, 1), lambda key: named.put(key, b"")):
            with pytest.raises(InvalidError):
                call(name)
