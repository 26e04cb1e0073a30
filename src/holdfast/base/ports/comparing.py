"""Replacing a small object where nothing compares and replaces in one step."""

from __future__ import annotations

from contextlib import suppress

from holdfast.base.ports.readable import Readable
from holdfast.errors import ConflictError, CorruptError, MissingError


def is_still_to_replace(store: Readable, key: str, data: bytes, seen: bytes | None) -> bool:
    """Return whether an object is still what the caller has read; False if it is what is to be stored already.

    Args:
        store: Where it is; another writer may come in between this look and what follows.
        key: Its key.
        data: What is to be stored.
        seen: What the caller has read; None: there was no object.
    Raises:
        ConflictError: It is something else.
    """
    conflict = ConflictError(f"{store.url}/{key}: another writer replaced it meanwhile; it was not touched")
    found = None
    try:
        with suppress(MissingError):
            found = store.get(key, max(len(data), len(seen or b"")))
    except CorruptError as larger:
        raise conflict from larger
    if found == data:
        return False
    if found != seen:
        raise conflict
    return True
