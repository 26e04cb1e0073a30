"""A store as it would be: what a repair would write lies over what is there, until it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.errors import CorruptError, MissingError
from holdfast.ports.store import Entry, Store, Upload


class OverlayStore:
    """A store of which small objects are replaced and removed in memory only."""

    def __init__(self, under: Store) -> None:
        self._under = under
        self.pending: dict[str, bytes | None] = {}
        """What would be stored by key, in the order in which it was put; None: it would be removed."""

    @property
    def url(self) -> str:
        """The store's."""
        return self._under.url

    @property
    def failed_calls_are_over(self) -> bool:
        """Nothing is called that could fail later."""
        return True

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Replace an object; one that is there as it is to be is left alone."""
        self.pending.pop(key, None)
        try:
            if self._under.size(key) == len(data) and self._under.get(key, len(data)) == data:
                return
        except MissingError:
            pass
        self.pending[key] = data

    def put_if_absent(self, key: str, data: bytes) -> None:
        """As `put`: whoever repairs replaces what is damaged."""
        self.put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        self.pending.update(dict.fromkeys(keys))

    def upload(self, key: str, total_bytes: int, part_bytes: int) -> Upload:
        """Never asked for: a repair writes no packs."""
        raise NotImplementedError(key)

    def size(self, key: str) -> int:
        """As the port says."""
        return len(self._held(key)) if key in self.pending else self._under.size(key)

    def get(self, key: str, bytes_max: int) -> bytes:
        """As the port says."""
        if key not in self.pending:
            return self._under.get(key, bytes_max)
        data = self._held(key)
        if len(data) > bytes_max:
            raise CorruptError(f"{self.url}/{key}: {len(data)} bytes; expected at most {bytes_max}")
        return data

    def get_ranges(
        self,
        key: str,
        ranges: Sequence[tuple[int, int]],
        buffers: Sequence[memoryview],
        arrived: Callable[[int, memoryview], None] | None = None,
    ) -> list[memoryview]:
        """As the port says; only packs are read so, which are never replaced."""
        return self._under.get_ranges(key, ranges, buffers, arrived)

    def get_cached(
        self,
        key: str,
        start: int,
        buffers: Sequence[memoryview],
        arrived: Callable[[memoryview], None] | None = None,
    ) -> int:
        """As the port says; only packs are read so, which are never replaced."""
        return self._under.get_cached(key, start, buffers, arrived)

    def folders(self, prefix: str = "") -> list[str]:
        """As the port says."""
        return self._under.folders(prefix)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """As the port says."""
        for entry in self._under.list(prefix):
            if entry.key not in self.pending:
                yield entry
        for key, data in self.pending.items():
            if data is not None and key.startswith(prefix):
                yield Entry(key, len(data))

    def _held(self, key: str) -> bytes:
        data = self.pending[key]
        if data is None:
            raise MissingError(f"{self.url}/{key}: no such object")
        return data
