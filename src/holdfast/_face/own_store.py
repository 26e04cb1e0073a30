"""A store that the user wrote, passed where a path is accepted."""

from __future__ import annotations

from typing import TypeGuard

from holdfast.base.ports.readable import StoreTraits
from holdfast.base.ports.store import Store
from holdfast.errors import InvalidError
from holdfast.settings import PAGE_BYTES

_REQUIRED = ("put", "put_if_absent", "size", "get", "read_into", "list", "delete", "move")
"""Methods without a default."""

_PROMISES = {
    "maps_files": (True, "mapped"),
    "checks_exclusive_creates": (True, "require_exclusive_creates"),
    "appears_whole": (False, "upload"),
}
"""Traits whose value promises a method of the store's own: the value, and the method."""

_ALIGNMENTS = {1 << power for power in range(PAGE_BYTES.bit_length())}

_SUITE = "Then run holdfast.testing.store.StoreSuite on the store (docs/stores.md, Your own store)"


def is_store(path: object) -> TypeGuard[Store]:
    """Return whether an argument is a store, and no path: whether its class derives from `Store`."""
    return Store in type(path).__mro__


def require_store(store: Store) -> Store:
    """Return a store of the user, if its class has every method and its traits are possible.

    Raises:
        InvalidError: A method is missing, or a trait is out of range or promises a method that is missing.
    """
    name = type(store).__name__
    if missing := [method for method in _REQUIRED if not _has_own(store, method)]:
        raise InvalidError(f"{name}: has no method {', '.join(missing)}; expected all of a holdfast.Store. {_SUITE}")
    url: object = getattr(store, "url", None)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidError(f"{name}: url={url!r}; expected a URL that names the place, such as 'sqlite:///run-7.db'")
    traits: object = store.traits
    if not isinstance(traits, StoreTraits):
        raise InvalidError(f"{name}: traits={traits!r}; expected a holdfast.StoreTraits. {_SUITE}")
    alignment, largest, page = traits.read_alignment, traits.object_bytes_max, traits.page_entries
    for trait, is_possible, expected in (
        ("read_alignment", alignment in _ALIGNMENTS, f"a power of two, at most {PAGE_BYTES}"),
        ("object_bytes_max", largest is None or largest >= PAGE_BYTES, f"at least {PAGE_BYTES}, or None"),
        ("page_entries", page is None or page >= 1, "at least 1, or None"),
    ):
        if not is_possible:
            raise InvalidError(f"{name}: traits.{trait}={getattr(traits, trait)!r}; expected {expected}. {_SUITE}")
    for trait, (value, method) in _PROMISES.items():
        if getattr(traits, trait) is value and not _has_own(store, method):
            raise InvalidError(f"{name}: traits.{trait}={value} promises a method {method}; expected one. {_SUITE}")
    return store


def _has_own(store: Store, method: str) -> bool:
    """Return whether a class has a method of its own, and not the default of `Store`."""
    return getattr(type(store), method) is not getattr(Store, method)
