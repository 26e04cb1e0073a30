"""Reads byte ranges of a file: cached bytes through the page cache, the others with direct I/O."""

from __future__ import annotations

import errno
import os

from holdfast.errors import CorruptError
from holdfast.ports.store import Buffers, ByteRanges, OnBytes, OnRange
from holdfast.settings import KIB, PAGE_BYTES
from holdfast.stores.oserrors import translate
from holdfast.stores.syscalls import Syscalls

_NOT_CACHED = {errno.EAGAIN, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}
_DIRECT_REFUSED = {errno.EINVAL, errno.ENOTSUP}

_CACHED_READ_BYTES_MAX = 256 * KIB
"""Bytes of one read of cached data: they fit a core's cache (measured: reading and hashing 1 MiB at a time takes 10 %
longer)."""


def read_ranges(
    syscalls: Syscalls,
    fd: int,
    ranges: ByteRanges,
    buffers: Buffers,
    where: str,
    on_range: OnRange | None = None,
) -> list[memoryview]:
    """Return for each range a view of its bytes inside its buffer.

    Args:
        syscalls: The operating system.
        fd: An open regular file, used by this call alone (its flags are changed).
        ranges: Half-open byte ranges within the file.
        buffers: One writable buffer per range, two pages longer; page-aligned, or direct reading is refused.
        where: Store and key, for messages.
        on_range: Called with number and bytes of each range, in order, before the next one is read.
    """
    reads = [_RangeRead(syscalls, fd, bounds, buffer, where) for bounds, buffer in zip(ranges, buffers, strict=True)]
    if on_range is None:
        # All cached bytes first: direct I/O needs a flag on the descriptor, so it is set only once.
        for read in reads:
            read.take_cached()
    direct: bool | None = None
    for number, read in enumerate(reads):
        if on_range is not None and direct is None:
            # After the first range that is not cached, stop looking in the cache: the next ranges will not be there
            # either, and a look makes the kernel read ahead.
            read.take_cached(PAGE_BYTES if number == 0 else _CACHED_READ_BYTES_MAX)
        if not read.whole:
            direct = read.take_rest(direct=_try_direct(syscalls, fd) if direct is None else direct)
        if on_range is not None:
            on_range(number, read.view)
    return [read.view for read in reads]


def _try_direct(syscalls: Syscalls, fd: int) -> bool:
    try:
        syscalls.set_direct(fd, True)
    except OSError as error:
        if error.errno not in _DIRECT_REFUSED:
            raise
        return False
    return True


def take_cached(
    syscalls: Syscalls,
    fd: int,
    start: int,
    buffers: Buffers,
    where: str,
    on_bytes: OnBytes | None = None,
    first_read_bytes: int = PAGE_BYTES,
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
                count = syscalls.preadv(fd, [view], position, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno in _NOT_CACHED:
                    return position - start
                raise translate(error, "read", where, writing=False) from error
            taken += count
            position += count
            if on_bytes is not None and count:
                on_bytes(view[:count])
            if count < view.nbytes:
                return position - start
            read_bytes = min(2 * read_bytes, _CACHED_READ_BYTES_MAX)
    return position - start


class _RangeRead:
    """Reads one range into its buffer.

    The buffer mirrors the file from the page in which the range starts, so whole pages of the file go to whole pages
    of the buffer.
    """

    def __init__(self, syscalls: Syscalls, fd: int, bounds: tuple[int, int], buffer: memoryview, where: str) -> None:
        self._syscalls = syscalls
        self._fd = fd
        self._start, self._stop = bounds
        self._position = self._start
        self._base = self._start - self._start % PAGE_BYTES
        self._buffer = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        self._where = f"{where} bytes [{self._start}, {self._stop})"

    @property
    def view(self) -> memoryview:
        """The range's bytes inside the buffer."""
        return self._buffer[self._start - self._base : self._stop - self._base]

    @property
    def whole(self) -> bool:
        """Whether every byte has been read."""
        return self._position >= self._stop

    def take_cached(self, first_read_bytes: int = PAGE_BYTES) -> None:
        """Read the cached bytes at the front of the range."""
        self._position += take_cached(
            self._syscalls, self._fd, self._start, [self.view], self._where, first_read_bytes=first_read_bytes
        )

    def take_rest(self, *, direct: bool) -> bool:
        """Read the remaining bytes; return whether direct I/O still works."""
        while not self.whole:
            start = self._position - self._position % PAGE_BYTES
            stop = -(-self._stop // PAGE_BYTES) * PAGE_BYTES
            view = self._buffer[start - self._base : stop - self._base]
            try:
                count = self._syscalls.preadv(self._fd, [view], start)
            except OSError as error:
                if not direct or error.errno not in _DIRECT_REFUSED:
                    raise translate(error, "read", self._where, writing=False) from error
                self._syscalls.set_direct(self._fd, False)
                direct = False
                continue
            if start + count <= self._position:
                raise CorruptError(f"{self._where}: the file ended at {start + count} while it was read")
            self._position = start + count
        return direct
