"""A store in the memory of this process that behaves like an object store."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.ports.store import Buffers, ByteRanges, Entry, OnBytes, OnRange, copy_ranges
from holdfast.stores.keys import split_key, split_prefix
from holdfast.stores.parts import PartLedger, check_buffers, check_ranges

_contents: dict[str, dict[str, bytes]] = {}
"""By name, the complete objects of the stores of that name: bytes by key."""

_lock = threading.Lock()
"""Held for every read and change of `_contents` and of the objects."""


class MemoryStore:
    """Keys to bytes in memory: for tests, and for checkpoints that need not outlive the process.

    Stores of one name in one process share their content, which lives until the process ends.
    """

    def __init__(self, name: str) -> None:
        """Open the content called `name`; it is empty at the first use."""
        self.url = f"memory://{name}"
        self.failed_calls_are_over = True
        """No call has an effect after it returned."""
        with _lock:
            self._objects = _contents.setdefault(name, {})

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store an object whole, replacing what was there."""
        split_key(key)
        with _lock:
            self._objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store an object whole unless the key exists."""
        split_key(key)
        with _lock:
            if key in self._objects:
                raise self._conflict(key)
            self._objects[key] = bytes(data)

    def upload(self, key: str, total_bytes: int, part_bytes: int, *, folders_durable: bool = True) -> _MemoryUpload:
        """Begin an object that must not exist yet; it is invisible until complete."""
        split_key(key)
        ledger = PartLedger(f"{self.url}/{key}", total_bytes=total_bytes, part_bytes=part_bytes)
        with _lock:
            if key in self._objects:
                raise self._conflict(key)
        return _MemoryUpload(self, key, ledger)

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        return len(self._object(key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        data = self._object(key)
        if len(data) > bytes_max:
            raise CorruptError(f"{self.url}/{key}: {len(data)} bytes; expected at most {bytes_max}. Read another copy")
        return data

    def get_ranges(
        self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> list[memoryview]:
        """Read byte ranges of one object to the front of each buffer."""
        data = memoryview(self._object(key))
        check_ranges(f"{self.url}/{key}", len(data), ranges, buffers)
        return copy_ranges([data[start:stop] for start, stop in ranges], buffers, on_range)

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Return 0: an object store caches nothing, and this store behaves like one."""
        check_buffers(f"{self.url}/{key}", len(self._object(key)), start, buffers)
        return 0

    def folders(self, prefix: str = "") -> list[str]:
        """Return the names of the folders directly under a prefix, sorted."""
        split_prefix(prefix)
        with _lock:
            suffixes = [key[len(prefix) :] for key in self._objects if key.startswith(prefix)]
        return sorted({suffix.split("/", 1)[0] for suffix in suffixes if "/" in suffix})

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield every complete object under a prefix."""
        split_prefix(prefix)
        with _lock:
            entries = [Entry(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix)]
        return iter(entries)

    def sync(self, prefix: str) -> None:
        """Do nothing: memory has no folders."""
        split_prefix(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent keys are no error."""
        for key in keys:
            split_key(key)
            with _lock:
                self._objects.pop(key, None)

    def link(self, key: str, new_key: str) -> bool:
        """Give an object one more key."""
        data = self._object(key)
        split_key(new_key)
        with _lock:
            if self._objects.setdefault(new_key, data) is not data:
                raise self._conflict(new_key)
        return True

    def identity(self, key: str) -> str:
        """Return a text that the keys of one object share."""
        return str(id(self._object(key)))

    def move(self, key: str, new_key: str) -> None:
        """Give an object another key."""
        split_key(key)
        split_key(new_key)
        with _lock:
            if key not in self._objects:
                raise self._missing(key)
            self._objects[new_key] = self._objects.pop(key)

    def _object(self, key: str) -> bytes:
        split_key(key)
        with _lock:
            data = self._objects.get(key)
        if data is None:
            raise self._missing(key)
        return data

    def _missing(self, key: str) -> MissingError:
        return MissingError(f"{self.url}/{key}: no such object")

    def _conflict(self, key: str) -> ConflictError:
        return ConflictError(f"{self.url}/{key}: another writer stored it; it was not touched")


class _MemoryUpload:
    """Collects parts that become one object in `complete`."""

    def __init__(self, store: MemoryStore, key: str, ledger: PartLedger) -> None:
        self._store = store
        self._key = key
        self._ledger = ledger
        self._lock = threading.Lock()
        self._parts: dict[int, bytes] = {}
        self._closed = False

    def write(self, offset: int, data: memoryview) -> None:
        self._ledger.check(offset, data.nbytes)
        part = bytes(data)
        with self._lock:
            self._require_open()
            self._parts[offset] = part
        self._ledger.written.add(offset)

    def complete(self) -> None:
        with self._lock:
            self._require_open()
            self._ledger.require_whole()
            self._store.put_if_absent(self._key, b"".join(self._parts[offset] for offset in sorted(self._parts)))
            self._close()

    def abort(self) -> None:
        with self._lock:
            self._close()

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidError(f"{self._store.url}/{self._key}: the upload was completed or aborted before")

    def _close(self) -> None:
        self._closed = True
        self._parts.clear()
