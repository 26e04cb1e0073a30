"""Stores of the compression bench: one as fast as a line that the whole job shares, one that counts what is read."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import holdfast
from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.base.ports.readable import Buffers, ByteRanges, OnBytes, OnRange, Release
from holdfast.base.ports.store import Upload

NEXT_FREE = struct.Struct("d")


class Line:
    """A line of so many bytes a second that several processes share: what is sent waits for what was sent before.

    The time at which the line is free again is in a file that all of them map. A line that was idle saves up nothing.
    """

    def __init__(self, path: Path, bytes_per_second: int) -> None:
        """Open the line, or make it. Every process of the job passes the same file."""
        self._rate = bytes_per_second
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, NEXT_FREE.size)
        self._shared = mmap.mmap(self._fd, NEXT_FREE.size)
        # A lock of the file keeps out processes, not the threads of this one.
        self._lock = threading.Lock()

    def send(self, count: int) -> None:
        """Wait as long as so many bytes take, and as the bytes before them take."""
        with self._lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                (next_free,) = NEXT_FREE.unpack(self._shared[:])
                # One clock for all processes of a machine.
                done = max(next_free, time.monotonic()) + count / self._rate
                self._shared[:] = NEXT_FREE.pack(done)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        time.sleep(max(done - time.monotonic(), 0.0))

    def close(self) -> None:
        """Close the file."""
        self._shared.close()
        os.close(self._fd)


class CappedUpload:
    """An upload whose bytes go over a line before they are written."""

    def __init__(self, upload: Upload, line: Line) -> None:
        self._upload, self._line = upload, line

    def room(self, offset: int, length_bytes: int) -> memoryview | None:
        """Return memory of the store, as the upload does."""
        return self._upload.room(offset, length_bytes)

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Write one part after its bytes went over the line."""
        self._line.send(data.nbytes)
        self._upload.write(offset, data, release)

    def complete(self, total_bytes: int | None = None) -> None:
        """Make the object durable."""
        self._upload.complete(total_bytes)

    def abort(self) -> None:
        """Remove what was written."""
        self._upload.abort()


class CappedStore(LocalStore):
    """A folder behind a line. Packs take time on it; small objects do not."""

    def __init__(self, root: Path, settings: holdfast.Settings, line: Line) -> None:
        super().__init__(root, settings=settings)
        self._line = line

    def upload(  # type: ignore[override]
        self, key: str, bytes_max: int, part_bytes: int, *, folders_durable: bool = True, may_be_less: bool = False
    ) -> CappedUpload:
        """Begin an object whose bytes go over the line."""
        upload = super().upload(key, bytes_max, part_bytes, folders_durable=folders_durable, may_be_less=may_be_less)
        return CappedUpload(upload, self._line)


class CountingStore(LocalStore):
    """A folder that counts the bytes that are asked of each file."""

    def __init__(self, root: Path, settings: holdfast.Settings) -> None:
        super().__init__(root, settings=settings)
        self.read_bytes: dict[str, int] = {}
        self._counts = threading.Lock()

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole."""
        data = super().get(key, bytes_max)
        self._count(key, len(data))
        return data

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read ranges; every byte of them counts."""
        super().read_into(key, ranges, buffers, on_range)
        self._count(key, sum(stop - start for start, stop in ranges))

    def get_cached(self, key: str, start: int, buffers: Buffers, on_bytes: OnBytes | None = None) -> int:
        """Read what is in the page cache; what was copied counts."""
        found = super().get_cached(key, start, buffers, on_bytes)
        self._count(key, found)
        return found

    def mapped(self, key: str) -> mmap.mmap | None:
        """Refuse: nobody can count what is read from mapped memory."""
        raise AssertionError(f"{key}: mapped while its reads are counted")

    def _count(self, key: str, count: int) -> None:
        with self._counts:
            self.read_bytes[key] = self.read_bytes.get(key, 0) + count


def manager_over(store: LocalStore, settings: holdfast.Settings, group: object = None) -> holdfast.CheckpointManager:
    """Return a manager of a run in a store that the bench made; a collective of the group."""
    return holdfast.CheckpointManager.over(store, wiring.saving_job(group, settings, store.url))


def pack_bytes(counts: dict[str, int]) -> int:
    """Return the bytes that were read of packs."""
    return sum(count for key, count in counts.items() if key.endswith(".safetensors"))


def packs_in(folder: Path) -> Iterable[Path]:
    """Return the packs of a checkpoint or a run."""
    return sorted(folder.rglob("*.safetensors"))
