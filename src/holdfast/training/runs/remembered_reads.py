"""A root whose manifests are read once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from holdfast.base.ports.store import Store
from holdfast.core.format import names
from holdfast.settings import MIB
from holdfast.stored.repository.catalog import exists

_REMEMBERED_BYTES_MAX = 64 * MIB


class RememberedReads:
    """A root that is only read. A writer never changes a manifest, so a manifest is remembered until `forget`."""

    def __init__(self, store: Store) -> None:
        """Do no I/O."""
        self._store = store
        self._manifests: dict[str, bytes] = {}
        self._room = _REMEMBERED_BYTES_MAX

    def __getattr__(self, name: str) -> object:
        """Return everything but `get` from the store."""
        return getattr(self._store, name)

    @property
    def as_store(self) -> Store:
        """The same object, for callers that take a store."""
        return cast(Store, self)

    def forget(self, steps: Iterable[int] | None) -> None:
        """Forget the manifests of some steps; None: all manifests."""
        for key in [*self._manifests] if steps is None else map(names.manifest_key, steps):
            self._drop(key)

    def forget_absent(self) -> None:
        """Forget the manifests that were removed, one request for each: the folder of a step may stay."""
        for key in [*self._manifests]:
            if not exists(self.as_store, key):
                self._drop(key)

    def _drop(self, key: str) -> None:
        self._room += len(self._manifests.pop(key, b""))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        data = self._manifests.get(key)
        if data is None:
            data = self._store.get(key, bytes_max)
            if key.endswith("/" + names.MANIFEST_FILE) or key.startswith(names.SUPERSEDED_FOLDER):
                self._manifests[key] = data
                self._room -= len(data)
            while self._room < 0:
                self._drop(next(iter(self._manifests)))
        return data
