"""A store of objects on paper: parts and index are files, packs exist only as keys and sizes, replies may come late.

It counts requests as a server would: a page of a listing is one. No client library and no network are in it.
"""

from __future__ import annotations

import bisect
import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.keys import is_listed
from holdfast.base.ports.readable import StoreEntry, StoreTraits
from holdfast.base.ports.store import Store
from holdfast.core.format.names import PACK_SUFFIX
from holdfast.errors import MissingError

OBJECT_BYTES_MAX = 5 << 30
"""Largest object of S3."""

PAGE_ENTRIES = 1000
PACKS_FILE = "packs.npy"
_RECORD = np.dtype([("key", "S120"), ("bytes", "<i8")])

_Result = TypeVar("_Result")


def write_packs(root: Path, packs: list[tuple[str, int]]) -> None:
    """Note the packs of a store, by key."""
    np.save(root / PACKS_FILE, np.array(sorted((key.encode(), size) for key, size in packs), dtype=_RECORD))


class PaperObjects(ForwardingStore):
    """Objects in a folder, and packs of which there are only keys and sizes."""

    def __init__(self, inner: Store, root: Path, reply_seconds: float = 0.0) -> None:
        """Take the packs that `write_packs` noted.

        Args:
            inner: Holds everything but the packs.
            root: Its folder.
            reply_seconds: How late each reply comes.
        """
        super().__init__(inner)
        self.traits = StoreTraits(object_bytes_max=OBJECT_BYTES_MAX, appears_whole=True, page_entries=PAGE_ENTRIES)
        self._reply_seconds = reply_seconds
        # Mapped: what a server knows takes no memory of the process that is measured.
        self._packs: Any = np.load(root / PACKS_FILE, mmap_mode="r")
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        """Requests so far, by method."""

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        if name != "sync":
            with self._lock:
                self.requests[name] += 1
            if self._reply_seconds:
                time.sleep(self._reply_seconds)
        return call()

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        if not key.endswith(PACK_SUFFIX):
            return super().size(key)
        at = self._first_not_before(key)
        found = [int(pack["bytes"]) for pack in self._packs[at : at + 1] if pack["key"].decode() == key]
        if not self._around("size", key, lambda: found):
            raise MissingError(f"{self.url}/{key}: no such object")
        return found[0]

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object under a prefix, in the order of the keys, page by page."""
        files = (entry for entry in self._inner.list(prefix, after=after, up_to=up_to) if "/" in entry.key)
        entries = heapq.merge(files, self._listed_packs(prefix, after, up_to), key=lambda entry: entry.key)
        count = 0
        for entry in entries:
            if count % PAGE_ENTRIES == 0:
                self._around("list", prefix, lambda: None)
            yield entry
            count += 1
        if not count:
            self._around("list", prefix, lambda: None)

    def _listed_packs(self, prefix: str, after: str, up_to: str | None) -> Iterator[StoreEntry]:
        for pack in self._packs[self._first_not_before(max(prefix, after)) :]:
            key = pack["key"].decode()
            if not key.startswith(prefix) or (up_to is not None and key > up_to):
                return
            if is_listed(key, after, up_to):
                yield StoreEntry(key, int(pack["bytes"]))

    def _first_not_before(self, key: str) -> int:
        return bisect.bisect_left(self._packs, key.encode(), key=lambda pack: bytes(pack["key"]))
