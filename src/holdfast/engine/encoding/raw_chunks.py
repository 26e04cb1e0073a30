"""The raw chunks of a coded pack, as they are encoded: copied from their sources, or in staged windows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Protocol

from holdfast.engine.buffers import QUARANTINED, allocate_aligned, copy_bytes
from holdfast.engine.staging import Staging
from holdfast.ports.framework import Source
from holdfast.types.plan import PackItem


class RawChunk(Protocol):
    """The raw bytes of a chunk."""

    def bytes(self) -> memoryview:
        """Return the bytes; called once, on the thread that encodes them."""
        ...

    def release(self) -> None:
        """Take the memory back; called once, on any thread."""
        ...


class RawChunks(Protocol):
    """Where the raw bytes of a pack come from."""

    def take(self, item: PackItem, start: int, stop: int) -> RawChunk:
        """Return a chunk of a piece. Called for each chunk in file order, on one thread."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


class ChunkMemory:
    """Memory for raw chunks, allocated when none is free and kept. Any thread may call."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        # Last in, first out: the buffer used last is still in the processor's cache.
        self._free: queue.LifoQueue[memoryview] = queue.LifoQueue()

    def take(self) -> memoryview:
        """Return memory of one chunk."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return allocate_aligned(self._chunk_bytes)

    def give(self, buffer: memoryview) -> None:
        """Take memory back."""
        self._free.put(buffer)


class CopiedChunks:
    """Chunks that are copied from the sources of a pack."""

    def __init__(self, sources: Sequence[Source], memory: ChunkMemory, *, in_order: bool) -> None:
        """Copy nothing yet.

        Args:
            sources: Where the bytes come from, by shard number.
            memory: Where they are copied to.
            in_order: Whether `take` copies: on its thread, in file order.
        """
        self._sources, self._memory, self._in_order = sources, memory, in_order

    def take(self, item: PackItem, start: int, stop: int) -> RawChunk:
        """Return a chunk."""
        chunk = _CopiedChunk(self._sources[item.shard_number], item, start, stop, self._memory)
        if self._in_order:
            chunk.copy()
        return chunk

    def close(self) -> None:
        """Do nothing: each chunk has memory of its own."""


class _CopiedChunk:
    def __init__(self, source: Source, item: PackItem, start: int, stop: int, memory: ChunkMemory) -> None:
        self._source, self._item, self._start, self._stop = source, item, start, stop
        self._memory = memory
        self._buffer: memoryview | None = None

    def bytes(self) -> memoryview:
        if self._buffer is None:
            self.copy()
        assert self._buffer is not None, "it is copied"
        return self._buffer[: self._stop - self._start]

    def copy(self) -> None:
        """Copy the bytes to memory of the encoder."""
        buffer = self._memory.take()
        try:
            room = buffer[: self._stop - self._start]
            self._source.copy_into(self._item.region, self._start, self._stop, room).wait()
        except BaseException:
            # A device may still be copying into it.
            QUARANTINED.append(buffer)
            raise
        self._buffer = buffer

    def release(self) -> None:
        if self._buffer is not None:
            self._memory.give(self._buffer)


class StagedChunks:
    """Chunks in staged windows, one after the other. A window goes back once nobody reads it.

    A chunk is encoded where it was copied to, if it is within one window and the arena has enough of them. Otherwise it
    is copied out, so that its windows go back at once: the thread that copies may wait for them.
    """

    def __init__(self, staging: Staging, memory: ChunkMemory, *, is_in_place: bool) -> None:
        self._staging, self._memory, self._is_in_place = staging, memory, is_in_place
        self._window: _SharedWindow | None = None
        self._used = 0

    def take(self, item: PackItem, start: int, stop: int) -> RawChunk:
        """Return the next chunk, waiting until it is staged."""
        window, length = self._current(), stop - start
        if self._is_in_place and length <= len(window.buffer) - self._used:
            chunk = _WindowChunk(window, self._used, self._used + length)
            self._advance(length)
            return chunk
        buffer, filled = self._memory.take(), 0
        try:
            while filled < length:
                window = self._current()
                part = window.buffer[self._used :][: length - filled]
                copy_bytes(part, buffer[filled : filled + len(part)])
                self._advance(len(part))
                filled += len(part)
        except BaseException:
            self._memory.give(buffer)
            raise
        return _HeldChunk(buffer, length, self._memory)

    def close(self) -> None:
        """Give the last window back."""
        window, self._window, self._used = self._window, None, 0
        if window is not None:
            window.leave()

    def _current(self) -> _SharedWindow:
        if self._window is None:
            self._window = _SharedWindow(self._staging.take(), self._staging)
        return self._window

    def _advance(self, count: int) -> None:
        self._used += count
        if self._window is not None and self._used == len(self._window.buffer):
            self.close()


class _SharedWindow:
    """A staged window with several readers; the last one gives it back."""

    def __init__(self, buffer: memoryview, staging: Staging) -> None:
        self.buffer = buffer
        self._staging, self._readers, self._lock = staging, 1, threading.Lock()

    def join(self) -> None:
        with self._lock:
            self._readers += 1

    def leave(self) -> None:
        with self._lock:
            self._readers -= 1
            is_last = not self._readers
        if is_last:
            self._staging.give(self.buffer)


class _WindowChunk:
    def __init__(self, window: _SharedWindow, start: int, stop: int) -> None:
        self._window, self._start, self._stop = window, start, stop
        window.join()

    def bytes(self) -> memoryview:
        return self._window.buffer[self._start : self._stop]

    def release(self) -> None:
        self._window.leave()


class _HeldChunk:
    def __init__(self, buffer: memoryview, length: int, memory: ChunkMemory) -> None:
        self._buffer, self._length, self._memory = buffer, length, memory

    def bytes(self) -> memoryview:
        return self._buffer[: self._length]

    def release(self) -> None:
        self._memory.give(self._buffer)
