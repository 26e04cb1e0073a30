"""Page-aligned buffers, allocated once and reused: fresh pages cost far more than the copy into them."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.settings import PAGE_BYTES


def new_slab(slab_bytes: int) -> memoryview:
    """Return a writable, page-aligned buffer of at least `slab_bytes`."""
    return memoryview(mmap.mmap(-1, -(-slab_bytes // PAGE_BYTES) * PAGE_BYTES))


class Slabs:
    """A fixed number of equal buffers; who wants one while all are out waits."""

    def __init__(self, count: int, slab_bytes: int) -> None:
        self._count, self._bytes, self._made = count, slab_bytes, 0
        self._making = threading.Lock()
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def take(self) -> memoryview:
        """Return a free buffer, made on first need."""
        with self._making:
            if self._made < self._count and self._free.empty():
                self._made += 1
                return new_slab(self._bytes)
        return self._free.get()

    def give(self, slab: memoryview) -> None:
        """Put a buffer back."""
        self._free.put(slab)

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Lend a buffer for the length of a block."""
        slab = self.take()
        try:
            yield slab
        finally:
            self.give(slab)
