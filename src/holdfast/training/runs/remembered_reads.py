"""A store that reads each manifest once. A writer never changes a manifest: a manifest moves or goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from holdfast.base.ports.store import Store
from holdfast.core.format.names import MANIFEST_FILE, SUPERSEDED_FOLDER


class RememberedReads:
    """A root that is only read. Manifests, and the folders in steps, are remembered until `forget`."""

    def __init__(self, store: Store) -> None:
        """Do no I/O."""
        self._store = store
        self._manifests: dict[str, bytes] = {}
        self._folders: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> object:
        """Return what is not remembered from the store."""
        return getattr(self._store, name)

    @property
    def as_store(self) -> Store:
        """The same object, for callers that take a store."""
        return cast(Store, self)

    def forget(self, prefixes: Iterable[str] | None) -> None:
        """Forget the folders of some steps, and with None everything."""
        for prefix in [*self._folders] if prefixes is None else prefixes:
            self._folders.pop(prefix, None)
            self._manifests.pop(prefix + MANIFEST_FILE, None)
        if prefixes is None:
            self._manifests.clear()

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        if key in self._manifests:
            return self._manifests[key]
        data = self._store.get(key, bytes_max)
        if key.endswith("/" + MANIFEST_FILE) or key.startswith(SUPERSEDED_FOLDER):
            self._manifests[key] = data
        return data

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders under a prefix."""
        if prefix not in self._folders:
            found = self._store.folders(prefix)
            if not prefix:
                return found
            self._folders[prefix] = found
        return self._folders[prefix]
