"""The raw chunks of a coded pack, as they are encoded: copied from their sources, or in staged windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from holdfast.base.ports.framework import Source
from holdfast.base.types.plan import PackItem
from holdfast.core.engine.buffers import QUARANTINED, across, allocate_aligned, copy_bytes
from holdfast.core.engine.staging import Staging


class RawChunk(Protocol):
    """The raw bytes of a chunk."""

    def bytes(self) -> memoryview:
        """Return the bytes; called once."""
        ...

    def release(self) -> None:
        """Take the memory back; called once."""
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
        self._free: deque[memoryview] = deque()

    def take(self) -> memoryview:
        """Return memory of one chunk."""
        try:
            return self._free.pop()
        except IndexError:
            return allocate_aligned(self._chunk_bytes)

    def give(self, buffer: memoryview) -> None:
        """Take memory back."""
        self._free.append(buffer)


class CopiedChunks:
    """Chunks that are copied from their sources when they are taken: in file order, as stored sources need."""

    def __init__(self, sources: Sequence[Source], memory: ChunkMemory) -> None:
        """Copy nothing yet.

        Args:
            sources: Where the bytes come from, by shard number.
            memory: Where they are copied to.
        """
        self._sources, self._memory = sources, memory

    def take(self, item: PackItem, start: int, stop: int) -> RawChunk:
        """Return a chunk."""
        buffer, length = self._memory.take(), stop - start
        try:
            self._sources[item.shard_number].copy_into(item.region, start, stop, buffer[:length]).wait()
        except BaseException:
            # A device may still be copying into it.
            QUARANTINED.append(buffer)
            raise
        return _HeldChunk(buffer, length, self._memory)

    def close(self) -> None:
        """Do nothing: each chunk has memory of its own."""


class StagedChunks:
    """Chunks in staged windows, one after the other. A window goes back once nobody reads it.

    A chunk is encoded where it was copied to, if its windows follow each other in memory and the arena has enough of
    them. Otherwise it is copied out, so that its windows go back at once: the thread that copies may wait for them.
    """

    def __init__(self, staging: Staging, memory: ChunkMemory, *, is_in_place: bool) -> None:
        self._staging, self._memory, self._is_in_place = staging, memory, is_in_place
        self._windows: deque[_SharedWindow] = deque()
        """Windows that were taken and are not used up."""
        self._used = 0
        """Bytes of the first one that are used."""

    def take(self, item: PackItem, start: int, stop: int) -> RawChunk:
        """Return the next chunk, waiting until it is staged."""
        length = stop - start
        chunk = self._in_place(length) if self._is_in_place else None
        if chunk is not None:
            self._advance(length)
            return chunk
        buffer, filled = self._memory.take(), 0
        try:
            while filled < length:
                part = self._current().buffer[self._used :][: length - filled]
                copy_bytes(part, buffer[filled : filled + len(part)])
                self._advance(len(part))
                filled += len(part)
        except BaseException:
            self._memory.give(buffer)
            raise
        return _HeldChunk(buffer, length, self._memory)

    def close(self) -> None:
        """Give every window back."""
        while self._windows:
            self._windows.popleft().leave()
        self._used = 0

    def _in_place(self, length: int) -> RawChunk | None:
        """Return the next chunk where it is; None if it is not in one piece."""
        windows: list[_SharedWindow] = []
        there = -self._used
        while there < length:
            windows.append(self._current(len(windows)))
            there += len(windows[-1].buffer)
        memory = across([window.buffer for window in windows])
        return None if memory is None else _WindowChunk(windows, memory[self._used : self._used + length])

    def _current(self, number: int = 0) -> _SharedWindow:
        """Return a window that is not used up: the first one, or one behind it."""
        if number == len(self._windows):
            self._windows.append(_SharedWindow(self._staging.take(), self._staging))
        return self._windows[number]

    def _advance(self, count: int) -> None:
        self._used += count
        while self._windows and self._used >= len(self._windows[0].buffer):
            window = self._windows.popleft()
            self._used -= len(window.buffer)
            window.leave()


class _SharedWindow:
    """A staged window with several readers; the last one gives it back."""

    def __init__(self, buffer: memoryview, staging: Staging) -> None:
        self.buffer = buffer
        self._staging, self._readers = staging, 1

    def join(self) -> None:
        self._readers += 1

    def leave(self) -> None:
        self._readers -= 1
        if not self._readers:
            self._staging.give(self.buffer)


class _WindowChunk:
    def __init__(self, windows: Sequence[_SharedWindow], memory: memoryview) -> None:
        self._windows, self._memory = windows, memory
        for window in windows:
            window.join()

    def bytes(self) -> memoryview:
        return self._memory

    def release(self) -> None:
        for window in self._windows:
            window.leave()


class _HeldChunk:
    def __init__(self, buffer: memoryview, length: int, memory: ChunkMemory) -> None:
        self._buffer, self._length, self._memory = buffer, length, memory

    def bytes(self) -> memoryview:
        return self._buffer[: self._length]

    def release(self) -> None:
        self._memory.give(self._buffer)
