"""A store as it would be after a repair: changes are kept in memory until they are carried out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import merge

from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, StoreEntry
from holdfast.base.ports.store import Store, Upload
from holdfast.errors import CorruptError, MissingError
from holdfast.stored.repository.publish import holds


class OverlayStore(ForwardingStore):
    """A store whose small objects are replaced and removed in memory only.

    Packs are read from the store beneath. A damaged one that will be replaced is read at the key of its proven copy.
    """

    def __init__(self, inner: Store) -> None:
        """Begin with no changes to `inner`."""
        super().__init__(inner)
        self.traits = replace(self.traits, failed_calls_are_over=True)  # No call writes to storage.
        self.pending: dict[str, bytes | None] = {}
        """New content by key, in the order of the calls; None: the object would be removed."""
        self.relinked: dict[str, str] = {}
        """Keys of damaged packs that would become links, each with the key of the pack that takes its place."""

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Replace an object, unless it has this content already."""
        self.pending.pop(key, None)
        if not holds(self._inner, key, data):
            self.pending[key] = data

    def replace(self, key: str, data: bytes, seen: bytes | None, *, durable: bool = True) -> None:
        """Replace an object: nobody else writes while a repair is planned."""
        self.put(key, data, durable=durable)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Replace an object as `put` does: a repair replaces what is damaged."""
        self.put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        self.pending.update(dict.fromkeys(keys))

    def move(self, key: str, new_key: str) -> None:
        """Raise: a repair copies and deletes."""
        raise NotImplementedError(key)

    def link(self, key: str, new_key: str) -> bool:
        """Raise: a repair links packs in the store beneath."""
        raise NotImplementedError(key)

    def upload(
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> Upload:
        """Raise: a repair writes no packs."""
        raise NotImplementedError(key)

    def sync(self, prefix: str) -> None:
        """Do nothing: no call writes to storage."""

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return len(self._pending_object(key)) if key in self.pending else self._inner.size(self._place_of(key))

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return self._inner.identity(self._place_of(key))

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object."""
        super().read_into(self._place_of(key), ranges, buffers, on_range)

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in memory already."""
        return super().get_cached(self._place_of(key), start, buffers, on_bytes)

    def _place_of(self, key: str) -> str:
        return self.relinked.get(key, key)

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        if key not in self.pending:
            return self._inner.get(key, bytes_max)
        data = self._pending_object(key)
        if len(data) > bytes_max:
            raise CorruptError(f"{self.url}/{key}: {len(data)} bytes; expected at most {bytes_max}")
        return data

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, in the order of the keys."""
        stored = self._inner.list(prefix, after=after, up_to=up_to)
        kept = (entry for entry in stored if entry.key not in self.pending)
        new = (
            StoreEntry(key, len(data))
            for key, data in sorted(self.pending.items())
            if data is not None and key.startswith(prefix) and key > after and (up_to is None or key <= up_to)
        )
        return merge(kept, new, key=lambda entry: entry.key)

    def _pending_object(self, key: str) -> bytes:
        data = self.pending[key]
        if data is None:
            raise MissingError(f"{self.url}/{key}: no such object")
        return data
