"""Reads files of a POSIX file system; a subclass maps keys to files."""

from __future__ import annotations

from contextlib import AbstractContextManager

from holdfast.errors import CorruptError
from holdfast.ports.store import Buffers, ByteRanges, OnBytes, OnRange
from holdfast.stores.local_ranges import read_ranges, take_cached
from holdfast.stores.oserrors import translated
from holdfast.stores.parts import check_buffers, check_ranges
from holdfast.stores.syscalls import Syscalls


class FileReading:
    """The read calls of `Readable`. A subclass opens the file of a key and names its place."""

    _syscalls: Syscalls

    def _where(self, key: str) -> str:
        """Return the place of a key, for messages."""
        raise NotImplementedError

    def _open_object(self, key: str) -> AbstractContextManager[tuple[int, int]]:
        """Open a regular file for reading: its descriptor and its real size in bytes."""
        raise NotImplementedError

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        where = self._where(key)
        with translated("read", where), self._open_object(key) as (fd, size):
            if size > bytes_max:
                raise CorruptError(f"{where}: {size} bytes; expected at most {bytes_max}")
            data = memoryview(bytearray(size))
            done = 0
            while done < size:
                count = self._syscalls.preadv(fd, [data[done:]], done)
                if not count:
                    raise CorruptError(f"{where}: ended at {done} of {size} bytes while it was read")
                done += count
            return bytes(data)

    def get_ranges(
        self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None
    ) -> list[memoryview]:
        """Read byte ranges of one object: cached bytes through the page cache, the others with direct I/O."""
        where = self._where(key)
        with translated("read", where), self._open_object(key) as (fd, size):
            check_ranges(where, size, ranges, buffers)
            return read_ranges(self._syscalls, fd, ranges, buffers, where, on_range)

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read the bytes that the page cache holds, from `start` on, into one buffer after the other."""
        where = self._where(key)
        with translated("read", where), self._open_object(key) as (fd, size):
            check_buffers(where, size, start, buffers)
            return take_cached(self._syscalls, fd, start, buffers, where, on_bytes)
