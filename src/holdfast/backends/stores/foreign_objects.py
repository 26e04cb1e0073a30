"""The files of another system in a store that is no file system: an object store, or memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from itertools import islice

from holdfast.base.ports.forwarding import ForwardingReadable
from holdfast.base.ports.keys import is_listed
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, InvalidError, MissingError

OBJECTS_MAX = 100_000
"""Objects that a folder may have; a folder with more is not a checkpoint. A listing of so many takes 100 requests."""


class ForeignObjects(ForwardingReadable):
    """Objects under the names of another system, read-only; implements `WatchedFiles`.

    The folder is listed once, when it is first asked about. So sizes, and what is absent, cost no request.
    """

    def __init__(self, store: Store, *, only: str = "") -> None:
        """Remember where; does no I/O.

        Args:
            store: The folder, which takes any names.
            only: Key of the one object that is read: only that one is looked at. Empty: any object of the folder.
        """
        super().__init__(store)
        self._store, self._only = store, only
        self._lock = threading.Lock()
        self._listed: dict[str, StoreEntry] | None = None
        self._alone: StoreEntry | None = None
        self._stamps: dict[str, str] = {}
        """By key, the stamp of each object that was asked for."""

    def for_operation(self, name: str, rank: int, world_size: int) -> ForeignObjects:
        """Return the files as one load sees them: the calls through it share one deadline."""
        return ForeignObjects(self._store.for_operation(name, rank, world_size), only=self._only)

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        entry = self._entry(key)
        if key not in self._stamps:
            self._stamps.setdefault(key, self._stamp_of(entry))
        return entry.bytes

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        self.size(key)
        return super().get(key, bytes_max)

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        rest = (key[len(prefix) :] for key in self._entries() if key.startswith(prefix))
        return sorted({name.partition("/")[0] for name in rest if "/" in name})

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, in the order of the keys.

        Raises:
            InvalidError: There are more than `OBJECTS_MAX` objects in the folder.
        """
        entries = self._entries()
        return (entries[key] for key in entries if key.startswith(prefix) and is_listed(key, after, up_to))

    def stamps(self, keys: Collection[str]) -> dict[str, str]:
        """Return by key the size and the tag of each object, and of those asked for in the same folders."""
        for key in keys:
            self.size(key)
        folders = {os.path.dirname(key) for key in keys}
        return {key: stamp for key, stamp in sorted(self._stamps.items()) if os.path.dirname(key) in folders}

    def require_unchanged(self, keys: Collection[str]) -> None:
        """Require that the objects of `stamps` are the same as when they were first seen here.

        Raises:
            ConflictError: An object was replaced; the message names it.
            MissingError: An object was removed.
        """
        seen = self.stamps(keys)
        now = ForeignObjects(self._store, only=self._only)
        for key, stamp in seen.items():
            if now._stamp_of(now._entry(key)) != stamp:
                raise ConflictError(
                    f"{self.url}/{key}: was replaced while it was read, so the data may be a mix of both versions. Run "
                    "the command again once no process writes to the object"
                )

    def _entry(self, key: str) -> StoreEntry:
        if key == self._only:
            if self._alone is None:
                self._alone = StoreEntry(key, self._store.size(key), self._store.identity(key))
            return self._alone
        entry = self._entries().get(key)
        if entry is None:
            raise MissingError(f"{self.url}/{key}: no such object")
        return entry

    def _entries(self) -> dict[str, StoreEntry]:
        with self._lock:
            if self._listed is None:
                entries = {entry.key: entry for entry in islice(self._store.list(), OBJECTS_MAX + 1)}
                if len(entries) > OBJECTS_MAX:
                    raise InvalidError(
                        f"{self.url}: over {OBJECTS_MAX} objects; expected one checkpoint. Name its folder"
                    )
                self._listed = entries
            return self._listed

    def _stamp_of(self, entry: StoreEntry) -> str:
        return f"{entry.bytes} {entry.tag or self._store.identity(entry.key)}"
