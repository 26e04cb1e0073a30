"""The instant of commit: one atomic put-if-absent, lost replies included."""

from __future__ import annotations

from holdfast.errors import ConflictError, MissingError
from holdfast.ports.store import Store


def publish(store: Store, key: str, data: bytes) -> None:
    """Put `data` at `key` unless something else is there; on "exists" compare, a lost reply is a success.

    Raises:
        ConflictError: Another writer's content is there; it was not touched.
        UnavailableError: The store failed; whether `data` is visible now is unknown.
    """
    try:
        store.put_if_absent(key, data)
    except ConflictError as conflict:
        if not holds(store, key, data):
            raise ConflictError(
                f"{store.url}/{key}: another writer published first; expected it absent. "
                "Nothing of it was touched. Stop, or save elsewhere"
            ) from conflict


def holds(store: Store, key: str, data: bytes) -> bool:
    """Return whether exactly `data` is stored at `key`."""
    try:
        return store.size(key) == len(data) and store.get(key, len(data)) == data
    except MissingError:
        return False
