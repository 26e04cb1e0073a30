"""Writes one pack: one thread copies and hashes in file order, others write full windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.engine.slabs import Slabs
from holdfast.ports.framework import Source
from holdfast.ports.store import Store, Upload
from holdfast.repository.digest import digest_of
from holdfast.repository.pack import pack_digest
from holdfast.settings import Settings
from holdfast.spec.chunking import chunk_count, chunk_range
from holdfast.spec.manifest import FileRecord
from holdfast.spec.plan import PackPlan


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """A pack that is durable, if not yet published."""

    record: FileRecord
    """Name, size and digest."""

    digests: tuple[bytes, ...]
    """For each item of the plan its chunk digests, 16 bytes each."""


class PackWriter:
    """Writes packs through a fixed set of windows."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._slabs = Slabs(settings.windows_in_flight + 1, settings.window_bytes)

    def write(self, key: str, header: bytes, pack: PackPlan, sources: Sequence[Source]) -> WrittenPack:
        """Write one pack and make it durable.

        Args:
            key: Where it goes.
            header: Its first bytes.
            pack: Its pieces.
            sources: Bytes by shard number.
        Raises:
            CheckpointError: It could not be written; nothing of it is left.
        """
        total_bytes = len(header) + pack.data_bytes
        upload = self._store.upload(key, total_bytes, self._settings.window_bytes)
        try:
            with _Windows(upload, self._slabs, self._settings) as windows:
                windows.append(header)
                digests = tuple(self._write_pieces(pack, sources, windows))
                windows.close()
            upload.complete()
        except BaseException:
            upload.abort()
            raise
        return WrittenPack(FileRecord(pack.name, total_bytes, pack_digest(header, b"".join(digests))), digests)

    def _write_pieces(self, pack: PackPlan, sources: Sequence[Source], windows: _Windows) -> Iterator[bytes]:
        chunk_bytes = self._settings.chunk_bytes
        with self._slabs_for_chunk(pack) as chunk_slab:
            for item in pack.items:
                digests = []
                source = sources[item.shard_number]
                for number in range(chunk_count(item.bytes, chunk_bytes)):
                    start, stop = chunk_range(item.bytes, chunk_bytes, number)
                    # A chunk that fits the current window is copied once and hashed where it lies; the digest
                    # is always of the copy, never of memory that training may change.
                    room = windows.room(stop - start)
                    chunk = (chunk_slab if room is None else room)[: stop - start]
                    source.copy_into(item.region, start, stop, chunk).wait()
                    digests.append(digest_of(chunk))
                    if room is None:
                        windows.append(chunk)
                    else:
                        windows.advance(stop - start)
                yield b"".join(digests)

    def _slabs_for_chunk(self, pack: PackPlan) -> _ChunkSlab:
        return _ChunkSlab(min(self._settings.chunk_bytes, max((item.bytes for item in pack.items), default=0)))


class _ChunkSlab:
    """A buffer for chunks that straddle two windows, made only if there are any pieces."""

    def __init__(self, slab_bytes: int) -> None:
        self._slab = memoryview(bytearray(slab_bytes))

    def __enter__(self) -> memoryview:
        return self._slab

    def __exit__(self, *_: object) -> None:
        self._slab.release()


class _Windows:
    """The stream of one pack, cut into windows that are written as soon as they are full."""

    def __init__(self, upload: Upload, slabs: Slabs, settings: Settings) -> None:
        self._upload, self._slabs = upload, slabs
        self._window_bytes = settings.window_bytes
        self._threads = ThreadPoolExecutor(settings.windows_in_flight, thread_name_prefix="holdfast-write")
        self._writes: list[Future[None]] = []
        self._slab: memoryview | None = None
        self._offset = self._filled = 0

    def __enter__(self) -> _Windows:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._slab is not None:
            self._slabs.give(self._slab)

    def room(self, count: int) -> memoryview | None:
        """Return the rest of the current window if `count` bytes fit in it."""
        if self._slab is None:
            self._open()
        assert self._slab is not None
        return self._slab[self._filled :] if self._filled + count <= self._window_bytes else None

    def advance(self, count: int) -> None:
        """Count bytes the caller put into `room`."""
        self._filled += count
        if self._filled == self._window_bytes:
            self._write()

    def append(self, data: bytes | memoryview) -> None:
        """Copy bytes into the stream, over as many windows as they take."""
        at = 0
        while at < len(data):
            if self._slab is None:
                self._open()
            assert self._slab is not None
            count = min(len(data) - at, self._window_bytes - self._filled)
            self._slab[self._filled : self._filled + count] = data[at : at + count]
            at += count
            self.advance(count)

    def close(self) -> None:
        """Write what is left and wait for every write."""
        if self._filled:
            self._write()
        for write in self._writes:
            write.result()

    def _open(self) -> None:
        for write in self._writes:
            # The first failed window ends the pack: nothing more is copied for it.
            if write.done():
                write.result()
        self._slab, self._filled = self._slabs.take(), 0

    def _write(self) -> None:
        assert self._slab is not None
        slab, count, offset = self._slab, self._filled, self._offset
        self._slab, self._filled, self._offset = None, 0, offset + count
        self._writes = [write for write in self._writes if not write.done() or write.exception()]
        try:
            write = self._threads.submit(self._upload.write, offset, slab[:count])
        except BaseException:
            self._slabs.give(slab)
            raise
        # A write that is cancelled never runs, and must give its slab back all the same.
        write.add_done_callback(lambda _: self._slabs.give(slab))
        self._writes.append(write)
