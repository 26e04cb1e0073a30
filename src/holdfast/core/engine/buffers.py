"""Page-aligned buffers, allocated once and reused: the first touch of a page costs far more than a copy into it."""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from holdfast.base.ports.codec import StoredPart
from holdfast.settings import MIB, PAGE_BYTES

_WIPE_ON_FORK = 18
"""`MADV_WIPEONFORK`, which Python does not name: a forked child sees zeros instead of sharing the memory."""

_POPULATE_READ = 22
"""`MADV_POPULATE_READ`, which Python does not name: a page that cannot be read is an error of this call, no signal."""

_HUGE_PAGE_BYTES = 2 * MIB

QUARANTINED: list[memoryview] = []
"""Buffers that are never lent again. The list keeps them, and their allocations, until the process ends."""


def allocate_aligned(buffer_bytes: int) -> memoryview:
    """Return a writable, page-aligned buffer of at least `buffer_bytes`.

    The memory uses huge pages if the kernel has them: one fault instead of 512, and a direct read or write pins one
    page instead of 512. The kernel may map memory at any page, so more is mapped than used: whole huge pages hold all
    of the buffer, and the rest is never touched. docs/decisions/024-buffer-arena.md has the measurements. Only private
    memory gets huge pages. After a fork private memory would be copied page by page, in the parent too; so a child
    gets none of it.
    """
    length = room = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
    if length >= _HUGE_PAGE_BYTES:
        room = (-(-length // _HUGE_PAGE_BYTES) + 1) * _HUGE_PAGE_BYTES
    private = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        private.madvise(_WIPE_ON_FORK)
    except OSError:
        return memoryview(mmap.mmap(-1, length))  # Linux before 4.14: memory shared by parent and child
    try:
        private.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # The kernel has no huge pages.
    memory = memoryview(private)
    first = -address_of(memory) % _HUGE_PAGE_BYTES if room > length else 0
    return memory[first : first + length]


def address_of(buffer: memoryview) -> int:
    """Return where the memory of a writable buffer of at least one byte begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def is_read_in(mapped: memoryview) -> bool:
    """Read all pages of a mapped file, and return whether that worked: touching the memory then raises no SIGBUS.

    Not `mmap.madvise`, which keeps Python's lock meanwhile. Linux before 5.14 cannot, and the answer is False.
    """
    address, length = ctypes.c_void_p(address_of(mapped)), ctypes.c_size_t(mapped.nbytes)
    return not ctypes.CDLL(None).madvise(address, length, _POPULATE_READ)


def across(buffers: Sequence[memoryview]) -> memoryview | None:
    """Return buffers that follow each other in memory as one; None if they do not, or are of several allocations.

    Args:
        buffers: One or more parts of what `allocate_aligned` returned, none of them empty.
    """
    first = buffers[0]
    if len(buffers) == 1:
        return first
    start = stop = address_of(first)
    for buffer in buffers:
        if buffer.obj is not first.obj or address_of(buffer) != stop:
            return None
        stop += len(buffer)
    whole = memoryview(first.obj)
    offset = start - address_of(whole)
    return whole[offset : offset + stop - start]


class BufferPool:
    """A fixed number of equal buffers from one allocation; `take` blocks while all are in use."""

    def __init__(self, count: int, buffer_bytes: int) -> None:
        stride = -(-buffer_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = allocate_aligned(count * stride)
        # Last in, first out: the buffer used last is still in the processor's cache. No LifoQueue: it has a lock, and a
        # signal handler may interrupt a save that takes a buffer.
        self._free: deque[memoryview] = deque()
        self._count: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stride = stride
        for number in reversed(range(count)):
            self.give(memory[number * stride : (number + 1) * stride])

    def take(self) -> memoryview:
        """Return a free buffer, waiting for one if needed."""
        self._count.get()
        return self._free.pop()

    def give(self, buffer: memoryview) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)
        self._count.put(None)

    def quarantine_buffer(self, buffer: memoryview) -> None:
        """Never lend a buffer again, since a device may still copy into it; add a new one in its place."""
        QUARANTINED.append(buffer)
        self.give(allocate_aligned(self._stride))

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Lend a buffer for the length of a block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give(buffer)


def copy_part(part: StoredPart, start: int, target: memoryview) -> None:
    """Fill memory with a part of a stored form, from byte `start` on."""
    if isinstance(part, memoryview):
        copy_bytes(part[start : start + len(target)], target)
    else:
        part.write(start, target)


_LOCKED_COPY_BYTES_MAX = 32 << 10
"""A shorter copy is over before another thread could take Python's lock."""


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy bytes to other memory of the same length.

    numpy copies without Python's lock. An assignment to a slice holds it, 60 µs for a MiB, and training waits.

    Raises:
        ValueError: The lengths differ.
    """
    if len(target) <= _LOCKED_COPY_BYTES_MAX:
        target[:] = source
    elif len(source) != len(target):  # numpy would repeat a single byte.
        raise ValueError(f"{len(source)} bytes to copy; expected {len(target)}")
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
