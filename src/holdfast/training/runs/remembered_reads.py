"""A store that reads each manifest once. A writer never changes a manifest: a manifest moves or goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from holdfast.base.ports.store import Store
from holdfast.core.format.names import MANIFEST_FILE, SUPERSEDED_FOLDER, manifest_key


class RememberedReads:
    """A root that is only read. Manifests are remembered until `forget`."""

    def __init__(self, store: Store) -> None:
        """Do no I/O."""
        self._store = store
        self._manifests: dict[str, bytes] = {}

    def __getattr__(self, name: str) -> object:
        """Return everything but `get` from the store."""
        return getattr(self._store, name)

    @property
    def as_store(self) -> Store:
        """The same object, for callers that take a store."""
        return cast(Store, self)

    def forget(self, steps: Iterable[int] | None) -> None:
        """Forget the manifests of some steps; None: all manifests."""
        for key in [*self._manifests] if steps is None else map(manifest_key, steps):
            self._manifests.pop(key, None)

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        data = self._manifests.get(key)
        if data is None:
            data = self._store.get(key, bytes_max)
            if key.endswith("/" + MANIFEST_FILE) or key.startswith(SUPERSEDED_FOLDER):
                self._manifests[key] = data
        return data
