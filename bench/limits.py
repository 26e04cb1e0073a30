"""The limit: the speed at which direct I/O writes and reads a plain file, with no other work."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
_HUGE_PAGE_BYTES = 2 * MIB
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

SHAPES = ((1, 4), (4, 4), (8, 1), (2, 16))
"""Windows in flight per process, and MiB of each; the limit of a round is the best of them."""

NAMES = tuple(f"{in_flight}x{mib}" for in_flight, mib in SHAPES)


class Limit:
    """Writes and reads one file per process. Memory and threads exist before the measurement starts."""

    def __init__(self, *, huge_pages: bool = False) -> None:
        """Allocate memory: ordinary pages as in a plain program, or huge pages as in Holdfast's buffers."""
        count = max(in_flight * mib for in_flight, mib in SHAPES) * MIB
        self._memory = _in_huge_pages(count) if huge_pages else memoryview(mmap.mmap(-1, count, flags=_PRIVATE))
        self._memory[:] = os.urandom(MIB) * (count // MIB)
        self._threads = ThreadPoolExecutor(max(in_flight for in_flight, _ in SHAPES))

    def write(self, path: Path, count: int, in_flight: int, mib: int) -> None:
        """Write and fsync a new, preallocated file of `count` bytes."""
        fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, count)
            self._move(os.pwrite, fd, count, in_flight, mib * MIB)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, in_flight: int, mib: int) -> None:
        """Read a whole file past the page cache."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            count = os.fstat(fd).st_size
            self._move(lambda fd, memory, at: os.preadv(fd, [memory], at), fd, count, in_flight, mib * MIB)
        finally:
            os.close(fd)

    def _move(
        self, move: Callable[[int, memoryview, int], int], fd: int, count: int, in_flight: int, window: int
    ) -> None:
        def lane(number: int) -> None:
            memory = self._memory[number * window : (number + 1) * window]
            for at in range(number * window, count, in_flight * window):
                wanted = min(window, count - at)
                moved = move(fd, memory[:wanted], at)
                assert moved == wanted, f"{moved} of {wanted} bytes at {at}"

        if in_flight == 1:
            lane(0)
        else:
            list(self._threads.map(lane, range(in_flight)))

    def close(self) -> None:
        """Release threads and memory."""
        self._threads.shutdown()
        self._memory.release()


def _in_huge_pages(count: int) -> memoryview:
    """Return `count` bytes that begin at a huge page, as the buffers of Holdfast do.

    This is not Holdfast's own function: the bench uses public names only, so that it can measure another checkout.
    """
    memory = mmap.mmap(-1, count + _HUGE_PAGE_BYTES, flags=_PRIVATE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # The kernel was built without huge pages.
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    return memoryview(memory)[first : first + count]
