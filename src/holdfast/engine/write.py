"""Writes packs: one thread copies and hashes a pack in file order, other threads write its full windows.

The bytes come straight from the sources, or from windows that another thread has filled (`engine/staging.py`).
`stream.stream` does both: it copies and hashes in one pass, or only hashes what is in the windows already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from holdfast.engine.buffers import BufferPool
from holdfast.engine.nonfinite import NonFinite
from holdfast.engine.parallel_map import CALLS_AT_ONCE, WorkerThreads
from holdfast.engine.staging import Staging
from holdfast.engine.stream import LentMemory, Scratch, stream
from holdfast.format.pack import pack_digest
from holdfast.ports.framework import Source
from holdfast.ports.lent_memory import TakesLentMemory
from holdfast.ports.store import Release, Store, Upload
from holdfast.settings import Settings
from holdfast.types.manifest import FileRecord
from holdfast.types.plan import PlannedPack


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """A pack that is durable, but named by no manifest yet."""

    record: FileRecord
    """Name, size and digest."""

    digests: tuple[bytes, ...]
    """For each item of the plan its chunk digests, 16 bytes per chunk."""

    nonfinite: Mapping[str, int]
    """Number of NaN or infinite elements by FQN, where there are any; empty if the settings do not count them."""


class Completions:
    """Completes uploads to a store of objects on threads of its own, while the next packs are copied and hashed.

    There an upload sends its bytes only when it is complete, so one after the other would leave the connection idle
    while a pack is filled, and fill none of several. The memory of the uploads under way bounds their number: a store
    lends no more until some is free, and neither does the arena. Within a block; at its end all uploads are durable, or
    it raises. A file was written window by window, so it is completed at once.
    """

    def __init__(self, completed: Callable[[], None] = lambda: None) -> None:
        """Start no thread yet.

        Args:
            completed: Called after each upload, on any thread.
        """
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

    def begin(self, upload: Upload | _LentUpload) -> None:
        """Complete an upload, or abort it if another one has failed.

        Raises:
            CheckpointError: Another upload has failed.
        """
        self._threads.begin(lambda: self._complete(upload))
        self._raise_failure()

    def _complete(self, upload: Upload | _LentUpload) -> None:
        try:
            if self._given_up or self._failures:
                upload.abort()
                return
            upload.complete()
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

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._buffers = BufferPool(settings.windows_in_flight + 1, settings.window_bytes)

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
    ) -> WrittenPack:
        """Write one pack straight from its sources and make it durable.

        Args:
            pack: The pack.
            sources: Where the bytes come from, by shard number.
            written: Called with the byte count of each window once it is written, on any thread.
            completions: Makes the pack durable, perhaps later; None: it is durable on return.
        Raises:
            InvalidError: A piece was changed while it was sent from where it lies; the pack is perhaps stored.
            CheckpointError: The write failed; nothing of the pack is left.
        """
        lent = self._lent(pack, sources)
        if lent is not None:
            return self._write_lent(pack, *lent, written, completions)
        return self._write(pack, self._buffers, sources, written, completions)

    def write_staged(
        self,
        pack: PlannedPack,
        staging: Staging,
        written: Callable[[int], None] | None = None,
        completions: Completions | None = None,
    ) -> WrittenPack:
        """Write the next staged pack and make it durable; each window returns to the arena once it is written.

        Args:
            pack: The pack.
            staging: Where its filled windows come from.
            written, completions: As `write`.
        Raises:
            CheckpointError: The write failed; nothing of the pack is left.
            BaseException: The copy failed with this error.
        """
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

    def _lent(self, pack: PlannedPack, sources: Sequence[Source]) -> tuple[LentMemory, Upload] | None:
        """Return a pack as it lies in memory, and its upload; None if it must be copied."""
        if not isinstance(self._store, TakesLentMemory):
            return None
        memory = LentMemory.of(pack.header, pack.plan, sources)
        upload = None if memory is None else self._store.lent_upload(pack.key, tuple(memory.parts))
        return None if memory is None or upload is None else (memory, upload)

    def _write_lent(
        self,
        pack: PlannedPack,
        memory: LentMemory,
        upload: Upload,
        written: Callable[[int], None] | None,
        completions: Completions | None,
    ) -> WrittenPack:
        nonfinite = NonFinite() if self._settings.count_nonfinite else None
        try:
            digests = stream(pack.header, pack.plan, memory, self._settings.chunk_bytes, None, nonfinite)
            checked = _LentUpload(upload, memory, digests, self._settings.chunk_bytes)
            if written is not None:
                written(pack.bytes)
            if completions is None:
                checked.complete()
        except BaseException:
            upload.abort()
            raise
        if completions is not None:
            completions.begin(checked)
        record = FileRecord(pack.plan.name, pack.bytes, pack_digest(pack.header, b"".join(digests)))
        return WrittenPack(record, digests, {} if nonfinite is None else nonfinite.counts)

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
        # A file was written window by window: to complete it later would gain nothing.
        later = completions if self.sends_whole_packs else None
        # The committing rank makes the folders durable, once for all ranks.
        upload = self._store.upload(pack.key, pack.bytes, settings.window_bytes, folders_durable=False)
        try:
            with _WrittenWindows(upload, pack.bytes, buffers, settings, written) as windows:
                digests = stream(pack.header, pack.plan, windows, settings.chunk_bytes, sources, nonfinite)
                windows.close()
            if later is None:
                upload.complete()
        except BaseException:
            upload.abort()
            raise
        if later is not None:
            later.begin(upload)
        record = FileRecord(pack.plan.name, pack.bytes, pack_digest(pack.header, b"".join(digests)))
        return WrittenPack(record, digests, {} if nonfinite is None else nonfinite.counts)


class _LentUpload:
    """An upload out of the memory of a state. What was sent must be what was hashed."""

    def __init__(self, inner: Upload, memory: LentMemory, digests: Sequence[bytes], chunk_bytes: int) -> None:
        self._inner, self._memory, self._digests, self._chunk_bytes = inner, memory, digests, chunk_bytes

    def complete(self, total_bytes: int | None = None) -> None:
        self._inner.complete(total_bytes)
        self._memory.require_unchanged(self._digests, self._chunk_bytes)
        self._memory.forget()

    def abort(self) -> None:
        self._inner.abort()
        self._memory.forget()


class _WrittenWindows:
    """The windows of one pack. Other threads write each one once it is full, and then return its buffer.

    A window that is still to be filled is memory of the store, if the store has some. A staged one is a buffer of the
    arena, which the store may keep until the pack is complete if the arena holds as many.
    """

    def __init__(
        self,
        upload: Upload,
        pack_bytes: int,
        buffers: BufferPool | Staging,
        settings: Settings,
        written: Callable[[int], None] | None,
    ) -> None:
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
        self._offset = self._filled = 0

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
            self._buffer, self._filled = self._next_window(), 0
        return self._buffer[self._filled : self._window_bytes]

    def _next_window(self) -> memoryview:
        count = min(self._window_bytes, self._pack_bytes - self._offset)
        room = self._upload.room(self._offset, count) if count and not self._is_staged else None
        self._is_room = room is not None
        return self._buffers.take() if room is None else room

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

    def _begin_write(self) -> None:
        assert self._buffer is not None
        buffer, count, offset = self._buffer, self._filled, self._offset
        give_back = _keep if self._is_room else partial(self._buffers.give, buffer)
        self._buffer, self._filled, self._offset = None, 0, offset + count
        self._threads.begin(lambda: self._write(offset, buffer[:count], give_back))

    def _write(self, offset: int, data: memoryview, give_back: Release) -> None:
        """Write a window, unless the pack has failed. Return its buffer in any case."""
        is_returned = False
        try:
            if self._given_up or self._failures:
                return
            # The store returns what it may keep.
            is_returned = self._may_be_kept
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


def _keep() -> None:
    """Return nothing: the window is memory of the store."""
