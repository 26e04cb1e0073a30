"""Reading byte ranges of a file: from the page cache what is there, directly what is not."""

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

_QUESTION_BYTES_MAX = 256 * KIB
"""Fits a core's own cache beside what else is there (measured: reading and hashing a MiB at a time takes a tenth
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
        # All cached bytes first: reading directly needs a flag on the descriptor, which is then set once.
        for read in reads:
            read.take_cached()
    direct: bool | None = None
    for number, read in enumerate(reads):
        if on_range is not None and direct is None:
            # Until one is not cached: the next will not be either, and asking would have it read ahead.
            read.take_cached(PAGE_BYTES if number == 0 else _QUESTION_BYTES_MAX)
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
    question_bytes: int = PAGE_BYTES,
) -> int:
    """Read from `start` on what the page cache holds into one buffer after the other; return how many bytes came.

    Asking for what is not there makes the kernel read it ahead, and the direct read that follows then competes
    with that (measured: less than half the speed). So the first question is one page long, and each next one
    twice the last; where what lies before was there, `question_bytes` may begin with more.
    """
    position = start
    for buffer in buffers:
        taken = 0
        while taken < buffer.nbytes:
            question = buffer[taken : taken + question_bytes - position % PAGE_BYTES]
            try:
                count = syscalls.preadv(fd, [question], position, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno in _NOT_CACHED:
                    return position - start
                raise translate(error, "read", where, writing=False) from error
            taken += count
            position += count
            if on_bytes is not None and count:
                on_bytes(question[:count])
            if count < question.nbytes:
                return position - start
            question_bytes = min(2 * question_bytes, _QUESTION_BYTES_MAX)
    return position - start


class _RangeRead:
    """One range on its way into its buffer.

    The buffer mirrors the file from the page in which the range starts, so whole pages read from the file land on
    whole pages of the buffer.
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
        """Whether every byte has arrived."""
        return self._position >= self._stop

    def take_cached(self, question_bytes: int = PAGE_BYTES) -> None:
        """Take from the front of the range what the page cache holds."""
        self._position += take_cached(
            self._syscalls, self._fd, self._start, [self.view], self._where, question_bytes=question_bytes
        )

    def take_rest(self, *, direct: bool) -> bool:
        """Read what is missing; return whether direct reading still works."""
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
