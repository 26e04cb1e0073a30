"""Replacing a small object where nothing compares and replaces in one step."""

from __future__ import annotations

from contextlib import suppress

from holdfast.base.ports.readable import Readable
from holdfast.errors import ConflictError, CorruptError, MissingError


def is_still_to_replace(store: Readable, key: str, data: bytes, seen: bytes | None) -> bool:
    """Return whether an object still has the bytes that the caller has read; False if the new bytes are stored already.

    Args:
        store: The store. Another writer may store the object between this look and the put of the caller.
        key: The key of the object.
        data: The bytes to store.
        seen: The bytes that the caller has read; None: there was no object.
    Raises:
        ConflictError: The object has other bytes.
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
