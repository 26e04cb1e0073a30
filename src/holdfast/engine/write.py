"""Writes packs: one thread copies and hashes a pack in file order, other threads write its full windows.

The bytes come straight from the sources, or from windows that another thread has filled (`engine/staging.py`).
`stream.stream` does both: it copies and hashes in one pass, or only hashes what is in the windows already. A coded pack
goes through `encoding.Encoder`, which copies, hashes and encodes. Its header is written last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Self

from holdfast.engine.buffers import BufferPool, allocate_aligned
from holdfast.engine.encoding.encode import NO_WEIGHTS, EncodedPiece, Encoder, KnownWeights
from holdfast.engine.encoding.meter import SaveMeter
from holdfast.engine.encoding.probe import ChunkProbe, PackProbe, Prepare
from holdfast.engine.encoding.raw_chunks import RawChunks
from holdfast.engine.nonfinite import NonFinite
from holdfast.engine.parallel_map import CALLS_AT_ONCE, WorkerThreads
from holdfast.engine.staging import Staging
from holdfast.engine.stream import Scratch, stream
from holdfast.format.pack import pack_digest
from holdfast.ports.codec import NO_CODECS, Codecs
from holdfast.ports.framework import Source
from holdfast.ports.store import Release, Store, Upload
from holdfast.settings import Settings
from holdfast.types.manifest import FileRecord
from holdfast.types.plan import Coding, PackPlan, PlannedPack

_UNMEASURED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """A pack that is durable, but named by no manifest yet."""

    record: FileRecord
    """Name, size and digest."""

    digests: tuple[bytes, ...]
    """For each item of the plan its chunk digests, 16 bytes per chunk."""

    nonfinite: Mapping[str, int]
    """Number of NaN or infinite elements by FQN, where there are any; empty if the settings do not count them."""

    offsets: tuple[int, ...]
    """For each item of the plan, the bytes from the start of the pack to it."""

    codings: tuple[Coding, ...] = ()
    """Of a coded pack, for each item of the plan, how its chunks are stored."""

    def stored_bytes(self, plan: PackPlan) -> int:
        """Return the bytes of all its pieces as they are stored."""
        return sum(coding.starts[-1] for coding in self.codings) if plan.is_coded else plan.data_bytes


class Completions:
    """Completes uploads to a store of objects on threads of its own, while the next packs are copied and hashed.

    There an upload sends its bytes only when it is complete, so one after the other would leave the connection idle
    while a pack is filled, and fill none of several. The memory of the uploads under way bounds their number: a store
    lends no more until some is free, and neither does the arena. Within a block; at its end all uploads are durable, or
    it raises. A file was written window by window, so it is completed at once.
    """

    def __init__(self, completed: Callable[[], None] = lambda: None, meter: SaveMeter | None = None) -> None:
        """Start no thread yet.

        Args:
            completed: Called after each upload, on any thread.
            meter: Measures the uploads; None: nothing does.
        """
        self._meter = meter
        self._threads = WorkerThreads(CALLS_AT_ONCE, "holdfast-complete")
        self._completed = completed
        self._failures: list[BaseException] = []
        self._given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up |= kind is not None
        self._threads.join()
        if kind is None:
            self._raise_failure()

    def begin(self, upload: Upload, total_bytes: int | None = None) -> None:
        """Complete an upload, or abort it if another one has failed.

        Args:
            upload: The upload.
            total_bytes: As for `Upload.complete`.
        Raises:
            CheckpointError: Another upload has failed.
        """
        self._threads.begin(lambda: self._complete(upload, total_bytes))
        self._raise_failure()

    def _complete(self, upload: Upload, total_bytes: int | None) -> None:
        try:
            if self._given_up or self._failures:
                upload.abort()
                return
            with _in_flight(self._meter, 0):
                upload.complete(total_bytes)
            self._completed()
        except BaseException as error:  # noqa: BLE001 - `begin` and the end of the block raise it
            self._failures.append(error)
            # The first error says more. A thread that ended here would leave the uploads that wait for it.
            with suppress(Exception):
                upload.abort()

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]


class PackWriter:
    """Writes packs through a fixed pool of buffers."""

    def __init__(self, store: Store, settings: Settings, codecs: Codecs = NO_CODECS, ranks_beside: int = 1) -> None:
        """Allocate the buffers.

        Args:
            store: Where packs go.
            settings: Sizes, and how packs are coded.
            codecs: What chunks are coded by.
            ranks_beside: Ranks that share the processors of this host, this one included.
        """
        self._store, self._settings = store, settings
        self._encoder = Encoder(codecs, settings, ranks_beside)
        self._buffers = BufferPool(settings.windows_in_flight + 1, settings.window_bytes)
        self.meter: SaveMeter | None = None
        """Measures what this writer does; None: nothing does."""
        self._probe: ChunkProbe | None = None

    @property
    def coding_threads(self) -> int:
        """Threads that code."""
        return self._encoder.threads

    def sampler(self, weight_types: Mapping[str, str], codec_for: Callable[[str], str]) -> Prepare:
        """Return what codes samples as this writer codes chunks; arguments as `Encoder.sampler`."""
        return self._encoder.sampler(weight_types, codec_for)

    def measured_by(self, meter: SaveMeter, probe: ChunkProbe | None) -> PackWriter:
        """Return a writer with the same buffers that a meter measures, and that takes the samples of a probe."""
        writer = copy.copy(self)
        writer.meter, writer._probe = meter, probe
        return writer

    def measuring_save(self) -> AbstractContextManager[None]:
        """Return a block within which all packs of a save are written."""
        return nullcontext() if self.meter is None else self.meter.saving()

    @property
    def sends_whole_packs(self) -> bool:
        """Whether the store gets a pack in one request, when the pack is complete."""
        return self._store.object_bytes_max is not None

    def through(self, store: Store) -> PackWriter:
        """Return a writer with the same buffers that writes through another view of the store."""
        writer = copy.copy(self)
        writer._store = store
        return writer

    def write(
        self,
        pack: PlannedPack,
        sources: Sequence[Source],
        written: Callable[[int], None] | None = None,
        completions: Completions | None = None,
        weights: KnownWeights = NO_WEIGHTS,
    ) -> WrittenPack:
        """Write one pack straight from its sources and make it durable.

        Args:
            pack: The pack.
            sources: Where the bytes come from, by shard number.
            written: Called with the byte count of each window once it is written, on any thread; of a coded pack, with
                the raw bytes of chunks once they are encoded.
            completions: Makes the pack durable, perhaps later; None: it is durable on return.
            weights: Of a coded pack, the weights that its masters were perhaps rounded from.
        Raises:
            CheckpointError: The write failed; nothing of the pack is left.
        """
        if pack.plan.is_coded:
            chunks = self._encoder.from_sources(sources)
            return self._write_coded(pack, chunks, written, completions, weights)
        return self._write(pack, self._buffers, sources, written, completions)

    def write_staged(
        self,
        pack: PlannedPack,
        staging: Staging,
        written: Callable[[int], None] | None = None,
        completions: Completions | None = None,
        weights: KnownWeights = NO_WEIGHTS,
    ) -> WrittenPack:
        """Write the next staged pack and make it durable; each window returns to the arena once it is written.

        Args:
            pack: The pack.
            staging: Where its filled windows come from.
            written, completions, weights: As `write`.
        Raises:
            CheckpointError: The write failed; nothing of the pack is left.
            BaseException: The copy failed with this error.
        """
        if pack.plan.is_coded:
            chunks = self._encoder.from_staging(staging)
            return self._write_coded(pack, chunks, written, completions, weights)
        return self._write(pack, staging, None, written, completions)

    def digests_of(self, pack: PlannedPack, sources: Sequence[Source]) -> tuple[bytes, ...]:
        """Return for each item of a pack the chunk digests of its source's current bytes."""
        with self.lent() as buffer:
            return stream(pack.header, pack.plan, Scratch(buffer), self._settings.chunk_bytes, sources)

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Lend a buffer to copy into for the length of a block.

        If the block raises, a device may still be copying into the buffer, so it is never lent again.
        """
        buffer = self._buffers.take()
        try:
            yield buffer
        except BaseException:
            self._buffers.quarantine_buffer(buffer)
            raise
        self._buffers.give(buffer)

    def _write(
        self,
        pack: PlannedPack,
        buffers: BufferPool | Staging,
        sources: Sequence[Source] | None,
        written: Callable[[int], None] | None,
        completions: Completions | None,
    ) -> WrittenPack:
        settings = self._settings
        nonfinite = NonFinite() if settings.count_nonfinite else None

        probe = None if self._probe is None else self._probe.of(pack)

        def write(upload: Upload) -> WrittenPack:
            windows = _WrittenWindows(upload, pack.bytes, buffers, settings, written, meter=self.meter, probe=probe)
            with windows, nullcontext() if self.meter is None else self.meter.working():
                digests = stream(pack.header, pack.plan, windows, settings.chunk_bytes, sources, nonfinite)
                windows.close()
            record = FileRecord(pack.plan.name, pack.bytes, pack_digest(pack.header, b"".join(digests)))
            offsets = tuple(len(pack.header) + item.data_offset for item in pack.plan.items)
            return WrittenPack(record, digests, {} if nonfinite is None else nonfinite.counts, offsets)

        return self._upload(pack, write, completions)

    def _write_coded(
        self,
        pack: PlannedPack,
        chunks: RawChunks,
        written: Callable[[int], None] | None,
        completions: Completions | None,
        weights: KnownWeights,
    ) -> WrittenPack:
        note, start, settings = written or _ignore, pack.header_bytes, self._settings

        def write(upload: Upload) -> WrittenPack:
            # What counts as written are raw bytes: how many of them there are is known before.
            raw, meter = pack.bytes, self.meter
            with _WrittenWindows(upload, raw, self._buffers, settings, lambda _: note(0), start, meter) as windows:
                pieces = self._encoder.encode(pack.plan, chunks, weights, windows.append, note, meter)
                assert pack.coded_header is not None, "a coded pack is planned with its header"
                header = pack.coded_header([piece.coding for piece in pieces])
                windows.close_behind(header)
            note(start)
            return _written_coded(pack, header, pieces)

        try:
            return self._upload(pack, write, completions)
        finally:
            chunks.close()

    def _upload(
        self, pack: PlannedPack, write: Callable[[Upload], WrittenPack], completions: Completions | None
    ) -> WrittenPack:
        """Begin an upload, let its parts be written, and complete it; if anything fails, nothing of it is left."""
        # A file was written window by window: to complete it later would gain nothing.
        later = completions if self.sends_whole_packs else None
        is_coded = pack.plan.is_coded
        upload = self._store.upload(
            pack.key, pack.bytes, self._settings.window_bytes, folders_durable=False, may_be_less=is_coded
        )
        try:
            result = write(upload)
            total_bytes = result.record.bytes if is_coded else None
            if later is None:
                with _in_flight(self.meter, 0):
                    upload.complete(total_bytes)
        except BaseException:
            upload.abort()
            raise
        if later is not None:
            later.begin(upload, total_bytes)
        return result


def _written_coded(pack: PlannedPack, header: bytes, pieces: Sequence[EncodedPiece]) -> WrittenPack:
    starts = [0, *accumulate(piece.coding.starts[-1] for piece in pieces)]
    digests = tuple(piece.digests for piece in pieces)
    record = FileRecord(pack.plan.name, len(header) + starts[-1], pack_digest(header, b"".join(digests)))
    by_piece = zip(pack.plan.items, pieces, strict=True)
    nonfinite = {item.tensor.fqn: piece.nonfinite for item, piece in by_piece if piece.nonfinite}
    offsets = tuple(len(header) + start for start in starts[:-1])
    return WrittenPack(record, digests, nonfinite, offsets, tuple(piece.coding for piece in pieces))


class _WrittenWindows:
    """The windows of one pack. Other threads write each one once it is full, and then return its buffer.

    A window that is still to be filled is memory of the store, if the store has some. A staged one is a buffer of the
    arena, which the store may keep until the pack is complete if the arena holds as many.

    The data of a coded pack begins behind a header that is made last. So the window in which it begins, the front, is
    kept until then; nothing is written of the windows before it.
    """

    def __init__(
        self,
        upload: Upload,
        pack_bytes: int,
        buffers: BufferPool | Staging,
        settings: Settings,
        written: Callable[[int], None] | None,
        data_start: int = 0,
        meter: SaveMeter | None = None,
        probe: PackProbe | None = None,
    ) -> None:
        """Begin at the start of the pack, or at the start of its data if its header is written last."""
        self._meter, self._probe = meter, probe
        self._upload, self._pack_bytes, self._buffers, self._written = upload, pack_bytes, buffers, written
        self._is_staged = isinstance(buffers, Staging)
        self._may_be_kept = isinstance(buffers, Staging) and buffers.may_be_kept(pack_bytes)
        self._is_room = False
        """Whether the current window is memory of the store."""
        self._window_bytes = settings.window_bytes
        self._threads = WorkerThreads(settings.windows_in_flight, "holdfast-write")
        self._failures: list[BaseException] = []
        self._given_up = False
        self._buffer: memoryview | None = None
        self._skipped = data_start % self._window_bytes
        """Bytes of the header in the front, until that is begun; then 0."""
        self._offset, self._filled = data_start - self._skipped, self._skipped
        self._front: tuple[int, memoryview, int] | None = None
        """Offset, memory and filled bytes of the front, once it is full."""

    def __enter__(self) -> _WrittenWindows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up |= kind is not None
        self._threads.join()
        if self._buffer is not None and not self._is_room:
            self._buffers.give(self._buffer)

    def room(self) -> memoryview:
        if self._buffer is None:
            # One failed window fails the pack, so copying more would be wasted.
            self._raise_failure()
            self._buffer, self._filled = self._next_window(), self._skipped
        return self._buffer[self._filled : self._window_bytes]

    def _next_window(self) -> memoryview:
        count = min(self._window_bytes, self._pack_bytes - self._offset)
        room = self._upload.room(self._offset, count) if count and not self._is_staged else None
        self._is_room = room is not None
        if room is None and self._skipped:
            # Not from the pool: packs that keep a buffer each while they wait for another would wait for ever.
            self._is_room, room = True, allocate_aligned(self._window_bytes)
        return self._buffers.take() if room is None else room

    def append(self, parts: Sequence[memoryview]) -> None:
        """Copy bytes to the windows."""
        for part in parts:
            at = 0
            while at < len(part):
                room = self.room()[: len(part) - at]
                room[:] = part[at : at + len(room)]
                self.advance(len(room))
                at += len(room)

    def advance(self, count: int) -> None:
        self._filled += count
        if self._filled == self._window_bytes:
            self._begin_write()

    def close(self) -> None:
        """Write the last window and wait for every write."""
        if self._filled:
            self._begin_write()
        self._threads.join()
        self._raise_failure()

    def close_behind(self, header: bytes) -> None:
        """Write the last window, then the header and the front; wait for every write."""
        if self._skipped:
            self.room()  # All data is in the front, or there is none.
        if self._filled:
            self._begin_write()
        stop = len(header) // self._window_bytes * self._window_bytes
        if self._front is not None:
            offset, buffer, count = self._front
            buffer[: len(header) - stop] = header[stop:]
            self._threads.begin(lambda: self._write(offset, buffer[:count], _keep))
        for start in range(0, stop, self._window_bytes):
            self._offset = start
            window = self._next_window()
            window[: self._window_bytes] = header[start : start + self._window_bytes]
            self._buffer, self._filled = window, self._window_bytes
            self._begin_write()
        self._threads.join()
        self._raise_failure()

    def _begin_write(self) -> None:
        assert self._buffer is not None
        buffer, count, offset = self._buffer, self._filled, self._offset
        if self._skipped:
            self._front = offset, buffer, count
            self._buffer, self._filled, self._offset, self._skipped = None, 0, offset + count, 0
            return
        give_back = _keep if self._is_room else partial(self._buffers.give, buffer)
        self._buffer, self._filled, self._offset = None, 0, offset + count
        self._threads.begin(lambda: self._write(offset, buffer[:count], give_back))

    def _write(self, offset: int, data: memoryview, give_back: Release) -> None:
        """Write a window, unless the pack has failed. Return its buffer in any case."""
        is_returned = False
        try:
            if self._given_up or self._failures:
                return
            if self._probe is not None:
                self._probe.look(offset, data)
            # The store returns what it may keep.
            is_returned = self._may_be_kept
            with _in_flight(self._meter, len(data)):
                self._upload.write(offset, data, give_back if self._may_be_kept else None)
            if self._written is not None:
                self._written(len(data))
        except BaseException as error:  # noqa: BLE001 - `room` and `close` raise it on the thread that copies
            self._failures.append(error)
        finally:
            if not is_returned:
                give_back()

    def _raise_failure(self) -> None:
        """Raise the error of the first window that failed."""
        if self._failures:
            raise self._failures[0]


def _in_flight(meter: SaveMeter | None, count: int) -> AbstractContextManager[None]:
    """Return a block that counts as a write of some bytes."""
    return _UNMEASURED if meter is None else meter.writing(count)


def _ignore(_: int) -> None:
    """Take note of nothing."""


def _keep() -> None:
    """Return nothing: the window is memory of the store."""
