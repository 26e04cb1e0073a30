"""Page-aligned buffers, allocated once and reused: fresh pages cost far more than the copy into them."""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.settings import MIB, PAGE_BYTES

_WIPE_ON_FORK = 18
"""`MADV_WIPEONFORK`, which Python does not name: a forked child finds the memory empty instead of sharing it."""

_HUGE_PAGE_BYTES = 2 * MIB

QUARANTINED: list[memoryview] = []
"""Buffers that are never lent again, kept, and with them the blocks they are cut from, while the process lives."""


def allocate_aligned(buffer_bytes: int) -> memoryview:
    """Return a writable, page-aligned buffer of at least `buffer_bytes`.

    Huge pages are asked for where the kernel has them: one fault instead of five hundred, and a direct read or write
    has one page to hold instead of as many. The kernel puts memory anywhere, so more is mapped than is used: whole huge
    pages hold all of the buffer, and the rest is never touched (docs/architecture.md, Amendments, has the
    measurements). Only private memory gets them, and private memory would be copied page by page after a fork, in the
    parent too; so the child is given none of it.
    """
    length = room = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
    if length >= _HUGE_PAGE_BYTES:
        room = (-(-length // _HUGE_PAGE_BYTES) + 1) * _HUGE_PAGE_BYTES
    private = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        private.madvise(_WIPE_ON_FORK)
    except OSError:
        return memoryview(mmap.mmap(-1, length))  # a kernel before 4.14: memory that parent and child share
    try:
        private.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel built without them
    first = -ctypes.addressof(ctypes.c_char.from_buffer(private)) % _HUGE_PAGE_BYTES if room > length else 0
    return memoryview(private)[first : first + length]


class BufferPool:
    """A fixed number of equal buffers cut from one allocation; who wants one while all are out waits."""

    def __init__(self, count: int, buffer_bytes: int) -> None:
        pitch = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = allocate_aligned(count * pitch)
        # Last in, first out: the buffer used a moment ago is the one still in the processor's cache.
        self._free: queue.LifoQueue[memoryview] = queue.LifoQueue()
        self._pitch = pitch
        for number in reversed(range(count)):
            self._free.put(memory[number * pitch : (number + 1) * pitch])

    def take(self) -> memoryview:
        """Return a free buffer."""
        return self._free.get()

    def give(self, buffer: memoryview) -> None:
        """Put a buffer back."""
        self._free.put(buffer)

    def quarantine_buffer(self, buffer: memoryview) -> None:
        """Never lend a buffer again, for a device may still copy into it; another takes its place."""
        QUARANTINED.append(buffer)
        self.give(allocate_aligned(self._pitch))

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Lend a buffer for the length of a block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give(buffer)
