"""Reads files of a POSIX file system: cached bytes through the page cache, the others with direct I/O."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from holdfast.backends.stores.oserrors import translated
from holdfast.backends.stores.syscalls import UNSUPPORTED, Syscalls, switch_to_direct
from holdfast.base.ports.parts import address_of
from holdfast.base.ports.ranges import check_buffers, check_ranges
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, Readable, StoreTraits
from holdfast.errors import CorruptError
from holdfast.settings import KIB, PAGE_BYTES

_CACHED_READ_BYTES_MAX = 256 * KIB
"""Bytes of one read of cached data: they fit a core's cache (measured: reading and hashing 1 MiB at a time takes 10 %
longer)."""


class FileReading(Readable):
    """The read calls of `Readable`. A subclass sets `url` and `_syscalls`, and opens the file of a key."""

    url: str
    """The absolute path of the root."""

    traits = StoreTraits(read_alignment=PAGE_BYTES, appears_whole=False, failed_calls_are_over=True, maps_files=True)
    """Direct I/O reads whole pages of a file into whole pages of memory."""

    _syscalls: Syscalls
    _is_in_memory = False
    """Whether the file system is in memory, and so has no page cache to ask: all bytes count as cached."""

    def _where(self, key: str) -> str:
        """Return the place of a key, for messages."""
        return f"{self.url}/{key}"

    def free_bytes(self) -> int | None:
        """Return the bytes that the file system of the root has free for this user; None before the root exists."""
        try:
            found = os.statvfs(self.url)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def _open_object(self, key: str) -> AbstractContextManager[tuple[int, int]]:
        """Open a regular file for reading: its descriptor and its real size in bytes."""
        raise NotImplementedError

    @contextmanager
    def opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Lend the descriptor of an object, opened for reading, and its bytes."""
        with translated("read", self._where(key)), self._open_object(key) as found:
            yield found

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        with translated("read", self._where(key)):
            return self._get(key, bytes_max)

    def _get(self, key: str, bytes_max: int) -> bytes:
        where = self._where(key)
        with self._open_object(key) as (fd, size):
            if size > bytes_max:
                raise CorruptError(f"{where}: {size} bytes; expected at most {bytes_max}. Read another copy")
            data = memoryview(bytearray(size))
            done = 0
            while done < size:
                count = self._syscalls.preadv(fd, [data[done:]], done)
                if not count:
                    raise CorruptError(f"{where}: ended at {done} of {size} bytes while it was read")
                done += count
            return bytes(data)

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object: cached bytes through the page cache, the others with direct I/O.

        Direct I/O needs buffers as `traits.read_alignment` says. With other buffers, all ranges go through the page
        cache.
        """
        where = self._where(key)
        with translated("read", where), self._open_object(key) as (fd, size):
            check_ranges(where, size, ranges, buffers)
            reads = [
                _RangeRead(self._syscalls, fd, where, bounds, buffer)
                for bounds, buffer in zip(ranges, buffers, strict=True)
            ]
            if on_range is None:
                # All cached bytes first: direct I/O needs a flag on the descriptor, so it is set only once.
                for read in reads:
                    read.take_cached()
            direct: bool | None = None
            for number, read in enumerate(reads):
                if on_range is not None and direct is None:
                    # After the first range that is not cached, stop looking in the cache: the next ranges will not be
                    # there either, and a look makes the kernel read ahead.
                    read.take_cached(PAGE_BYTES if number == 0 else _CACHED_READ_BYTES_MAX)
                if not read.whole:
                    if direct is None:
                        direct = all(each.is_aligned for each in reads) and switch_to_direct(self._syscalls, fd)
                    direct = read.take_rest(direct=direct)
                if on_range is not None:
                    on_range(number, read.view)

    def mapped(self, key: str) -> mmap.mmap | None:
        """Map all bytes of an object as private memory, read from the file where it is touched; None if it is empty."""
        where = self._where(key)
        with translated("map", where), self._open_object(key) as (fd, size):
            return self._syscalls.map_private(fd, size) if size else None

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read the bytes that the page cache holds, from `start` on, into one buffer after the other."""
        where = self._where(key)
        with translated("read", where), self._open_object(key) as (fd, size):
            check_buffers(where, size, start, buffers)
            if self._is_in_memory:
                return _take_cached(self._syscalls, fd, start, buffers, on_bytes, _CACHED_READ_BYTES_MAX, flags=0)
            return _take_cached(self._syscalls, fd, start, buffers, on_bytes, PAGE_BYTES)


def _take_cached(
    syscalls: Syscalls,
    fd: int,
    start: int,
    buffers: Buffers,
    on_bytes: OnBytes | None,
    first_read_bytes: int,
    flags: int = os.RWF_NOWAIT,
) -> int:
    """Read cached bytes from `start` on into one buffer after the other; return the number of bytes read.

    A read of bytes that are not cached makes the kernel read ahead, which competes with the direct read that follows
    (measured: less than half the speed). So the first read is one page, and each next one is twice as long. If the
    bytes before `start` were cached, `first_read_bytes` may be larger.
    """
    position, read_bytes = start, first_read_bytes
    for buffer in buffers:
        taken = 0
        while taken < buffer.nbytes:
            view = buffer[taken : taken + read_bytes - position % PAGE_BYTES]
            try:
                count = syscalls.preadv(fd, [view], position, flags)
            except OSError as error:
                if error.errno == errno.EAGAIN or error.errno in UNSUPPORTED:
                    return position - start
                raise
            taken += count
            position += count
            if on_bytes is not None and count:
                on_bytes(view[:count])
            if count < view.nbytes:
                return position - start
            read_bytes = min(2 * read_bytes, _CACHED_READ_BYTES_MAX)
    return position - start


class _RangeRead:
    """Reads one range of an open file into its buffer."""

    def __init__(self, syscalls: Syscalls, fd: int, where: str, bounds: tuple[int, int], buffer: memoryview) -> None:
        self._syscalls, self._fd = syscalls, fd
        self._start, self._stop = bounds
        self._position = self._start
        self._where = f"{where} bytes [{self._start}, {self._stop})"
        self.view = buffer if (buffer.format == "B" and buffer.ndim == 1) or not buffer.nbytes else buffer.cast("B")
        """The buffer, as bytes."""

    @property
    def whole(self) -> bool:
        """Whether every byte has been read."""
        return self._position >= self._stop

    @property
    def is_aligned(self) -> bool:
        """Whether whole pages of the file go to whole pages of the buffer."""
        return self._start == self._stop or (address_of(self.view) - self._start) % PAGE_BYTES == 0

    def take_cached(self, first_read_bytes: int = PAGE_BYTES) -> None:
        """Read the cached bytes at the front of the range."""
        try:
            self._position += _take_cached(self._syscalls, self._fd, self._start, [self.view], None, first_read_bytes)
        except OSError:
            with translated("read", self._where):
                raise

    def take_rest(self, *, direct: bool) -> bool:
        """Read the remaining bytes; return whether direct I/O still works."""
        edges: list[tuple[int, memoryview]] = []
        while not self.whole:
            start, parts = self._position, [self.view[self._position - self._start :]]
            if direct:
                start, parts, edges = self._pages()
            try:
                count = self._syscalls.preadv(self._fd, parts, start)
            except OSError as error:
                if not direct or error.errno not in UNSUPPORTED:
                    with translated("read", self._where):
                        raise
                self._syscalls.set_direct(self._fd, False)
                direct, edges = False, []
                continue
            if start + count <= self._position:
                raise CorruptError(f"{self._where}: the file ended at {start + count} while it was read")
            stop = min(start + count, self._stop)
            for edge_start, edge in edges:
                first, last = max(self._position, edge_start), min(stop, edge_start + len(edge))
                if first < last:
                    self.view[first - self._start : last - self._start] = edge[first - edge_start : last - edge_start]
            self._position = stop
        return direct

    def _pages(self) -> tuple[int, list[memoryview], list[tuple[int, memoryview]]]:
        """Return whole pages to read the rest into: the first byte, the memory in order, and what of it is an edge.

        Pages of which the range has only a part, at either end, are read into memory beside the buffer.
        """
        first = self._position - self._position % PAGE_BYTES
        last = -(-self._stop // PAGE_BYTES) * PAGE_BYTES
        inner_first = -(-self._position // PAGE_BYTES) * PAGE_BYTES
        inner_last = self._stop - self._stop % PAGE_BYTES
        if inner_first >= inner_last:
            edge = _page_aligned(last - first)
            return first, [edge], [(first, edge)]
        parts, edges = [self.view[inner_first - self._start : inner_last - self._start]], []
        if first < inner_first:
            edges.append((first, _page_aligned(PAGE_BYTES)))
            parts.insert(0, edges[0][1])
        if inner_last < last:
            edges.append((inner_last, _page_aligned(PAGE_BYTES)))
            parts.append(edges[-1][1])
        return first, parts, edges


def _page_aligned(count: int) -> memoryview:
    """Return a few pages of memory, without a system call as a mapping would take."""
    memory = memoryview(bytearray(count + PAGE_BYTES))
    first = -address_of(memory) % PAGE_BYTES
    return memory[first : first + count]
