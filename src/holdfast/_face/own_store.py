"""A store that the user wrote, passed where a path is accepted."""

from __future__ import annotations

from typing import TypeGuard

from holdfast.backends.stores.objects.address import SCHEMES
from holdfast.base.ports.readable import StoreTraits
from holdfast.base.ports.store import Store
from holdfast.errors import InvalidError
from holdfast.settings import MIB, PAGE_BYTES

_REQUIRED = ("put", "put_if_absent", "size", "get", "read_into", "list", "delete", "move")
"""Methods without a default."""

_PROMISES = {
    "maps_files": (True, "mapped"),
    "checks_exclusive_creates": (True, "require_exclusive_creates"),
    "appears_whole": (False, "upload"),
}
"""Traits whose value promises a method of the store's own: the value, and the method."""

_ALIGNMENTS = {1 << power for power in range(PAGE_BYTES.bit_length())}

_TAKEN = {*SCHEMES, "file", "memory"}
"""Schemes by which other places are opened."""

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
    scheme, separator, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not scheme or not separator or scheme in _TAKEN or not str(url).isprintable():
        raise InvalidError(
            f"{name}: url={str(url)[:80]!r}; expected the place as a URL with a scheme of its own, such as "
            "'sqlite:///run-7.db'"
        )
    traits: object = store.traits
    if not isinstance(traits, StoreTraits):
        raise InvalidError(f"{name}: traits={str(traits)[:80]}; expected a holdfast.StoreTraits. {_SUITE}")
    alignment, largest, page = traits.read_alignment, traits.object_bytes_max, traits.page_entries
    flags = {trait: getattr(traits, trait) for trait in (*_PROMISES, "failed_calls_are_over", "has_parity")}
    for trait, is_possible, expected in (
        ("read_alignment", type(alignment) is int and alignment in _ALIGNMENTS, f"a power of two up to {PAGE_BYTES}"),
        ("object_bytes_max", largest is None or (type(largest) is int and largest >= MIB), f"at least {MIB}, or None"),
        ("page_entries", page is None or (type(page) is int and page >= 1), "at least 1, or None"),
        *((trait, type(value) is bool, "True or False") for trait, value in flags.items()),
    ):
        if not is_possible:
            found = str(getattr(traits, trait))[:80]
            raise InvalidError(f"{name}: traits.{trait}={found}; expected {expected}. {_SUITE}")
    for trait, (value, method) in _PROMISES.items():
        if flags[trait] is value and not _has_own(store, method):
            raise InvalidError(f"{name}: traits.{trait}={value} promises a method {method}; expected one. {_SUITE}")
    return store


def _has_own(store: Store, method: str) -> bool:
    """Return whether a class has a method of its own, and not the default of `Store`."""
    own: object = getattr(type(store), method)
    return callable(own) and own is not getattr(Store, method)
