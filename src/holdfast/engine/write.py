"""Writes packs: copied and hashed in file order, written in full windows by other threads.

A pack is written straight from its sources, or is staged first and written later: the same stream of windows, filled
in one pass and hashed in the same one or in a later one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.arena import Arena
from holdfast.engine.slabs import Slabs
from holdfast.ports.framework import Source
from holdfast.ports.store import Store, Upload
from holdfast.repository.digest import digest_of, new_digest
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


class StagedPack:
    """A pack copied into slabs of an arena, not yet hashed or written."""

    def __init__(self, header: bytes, pack: PackPlan, arena: Arena) -> None:
        self.header, self.pack = header, pack
        self.slabs: deque[memoryview] = deque()
        """Windows in file order; those that are written have left it."""
        self._arena = arena

    def give(self, slab: memoryview) -> None:
        """Give one slab back."""
        self._arena.give(slab)

    def release(self) -> None:
        """Give back every slab that is left; the pack is of no use then."""
        while self.slabs:
            self._arena.give(self.slabs.popleft())


class PackWriter:
    """Writes packs through a fixed set of windows."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._slabs = Slabs(settings.windows_in_flight + 1, settings.window_bytes)

    def write(self, key: str, header: bytes, pack: PackPlan, sources: Sequence[Source]) -> WrittenPack:
        """Write one pack straight from its sources and make it durable.

        Args:
            key: Where it goes.
            header: Its first bytes.
            pack: Its pieces.
            sources: Bytes by shard number.
        Raises:
            CheckpointError: It could not be written; nothing of it is left.
        """
        return self._write(key, header, pack, self._slabs.take, self._slabs.give, sources)

    def stage(
        self, header: bytes, pack: PackPlan, sources: Sequence[Source], arena: Arena, slabs: deque[memoryview]
    ) -> StagedPack:
        """Copy one pack into slabs of an arena, each as long as a window.

        Args:
            header: Its first bytes.
            pack: Its pieces.
            sources: Bytes by shard number.
            arena: Where the slabs go once they are written.
            slabs: Slabs lent by it; those used are taken from the front.
        """
        assert arena.slab_bytes == self._settings.window_bytes, "a slab of the arena is one window"
        staged = StagedPack(header, pack, arena)
        try:
            windows = _Filled(slabs, staged.slabs, arena.slab_bytes)
            _stream(header, pack, windows, self._settings.chunk_bytes, sources, digesting=False)
        except BaseException:
            staged.release()
            raise
        return staged

    def write_staged(self, key: str, staged: StagedPack) -> WrittenPack:
        """Write a staged pack and make it durable; its slabs go back to the arena as they are written.

        Raises:
            CheckpointError: It could not be written; nothing of it is left.
        """
        try:
            return self._write(key, staged.header, staged.pack, staged.slabs.popleft, staged.give, None)
        finally:
            staged.release()

    def _write(
        self,
        key: str,
        header: bytes,
        pack: PackPlan,
        take: Callable[[], memoryview],
        give: Callable[[memoryview], None],
        sources: Sequence[Source] | None,
    ) -> WrittenPack:
        total_bytes = len(header) + pack.data_bytes
        upload = self._store.upload(key, total_bytes, self._settings.window_bytes)
        try:
            with _Written(upload, take, give, self._settings) as windows:
                digests = _stream(header, pack, windows, self._settings.chunk_bytes, sources, digesting=True)
                windows.close()
            upload.complete()
        except BaseException:
            upload.abort()
            raise
        return WrittenPack(FileRecord(pack.name, total_bytes, pack_digest(header, b"".join(digests))), digests)


class _Windows(Protocol):
    """The stream of one pack, cut into windows."""

    def room(self) -> memoryview:
        """Return the rest of the current window, never empty."""
        ...

    def advance(self, count: int) -> None:
        """Count bytes of `room` that are done with."""
        ...


def _stream(
    header: bytes,
    pack: PackPlan,
    windows: _Windows,
    chunk_bytes: int,
    sources: Sequence[Source] | None,
    *,
    digesting: bool,
) -> tuple[bytes, ...]:
    """Go through a pack in file order once; return the chunk digests of each item if they are asked for.

    Args:
        header, pack: The pack.
        windows: Where its bytes go, or where they are.
        chunk_bytes: What one digest is of.
        sources: What fills the windows; None if they are filled already.
        digesting: Whether chunks are hashed, each as soon as it is copied and still in the processor's cache. The
            digest is always of the copy, never of memory that training may change.
    """
    at = 0
    while at < len(header):
        room = windows.room()
        count = min(len(header) - at, len(room))
        if sources is not None:
            room[:count] = header[at : at + count]
        windows.advance(count)
        at += count
    found: list[bytes] = []
    for item in pack.items:
        digests: list[bytes] = []
        source = None if sources is None else sources[item.shard_number]
        for number in range(chunk_count(item.bytes, chunk_bytes)):
            start, stop = chunk_range(item.bytes, chunk_bytes, number)
            chunk = windows.room()[: stop - start]
            if len(chunk) == stop - start:
                if source is not None:
                    source.copy_into(item.region, start, stop, chunk).wait()
                if digesting:
                    digests.append(digest_of(chunk))
                windows.advance(stop - start)
                continue
            # Windows begin on whole pages, so that no element is cut in two.
            state = new_digest()
            while start < stop:
                part = windows.room()[: stop - start]
                if source is not None:
                    source.copy_into(item.region, start, start + len(part), part).wait()
                if digesting:
                    state.update(part)
                windows.advance(len(part))
                start += len(part)
            digests.append(state.digest())
        found.append(b"".join(digests))
    return tuple(found)


class _Filled:
    """Windows kept in slabs of an arena."""

    def __init__(self, empty: deque[memoryview], filled: deque[memoryview], slab_bytes: int) -> None:
        self._empty, self._slabs, self._slab_bytes = empty, filled, slab_bytes
        self._filled = slab_bytes

    def room(self) -> memoryview:
        if self._filled == self._slab_bytes:
            self._slabs.append(self._empty.popleft())
            self._filled = 0
        return self._slabs[-1][self._filled :]

    def advance(self, count: int) -> None:
        self._filled += count


class _Written:
    """Windows that are written as soon as they are full."""

    def __init__(
        self, upload: Upload, take: Callable[[], memoryview], give: Callable[[memoryview], None], settings: Settings
    ) -> None:
        self._take, self._window_bytes = take, settings.window_bytes
        self._writers = _Writers(upload, give, settings.windows_in_flight)
        self._give = give
        self._slab: memoryview | None = None
        self._offset = self._filled = 0

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writers.end(give_up=kind is not None)
        if self._slab is not None:
            self._give(self._slab)

    def room(self) -> memoryview:
        if self._slab is None:
            # The first failed window ends the pack: nothing more is copied for it.
            self._writers.raise_failure()
            self._slab, self._filled = self._take(), 0
        return self._slab[self._filled : self._window_bytes]

    def advance(self, count: int) -> None:
        self._filled += count
        if self._filled == self._window_bytes:
            self._write()

    def close(self) -> None:
        """Write what is left and wait for every write."""
        if self._filled:
            self._write()
        self._writers.end(give_up=False)
        self._writers.raise_failure()

    def _write(self) -> None:
        assert self._slab is not None
        slab, count, offset = self._slab, self._filled, self._offset
        self._slab, self._filled, self._offset = None, 0, offset + count
        self._writers.write(offset, slab, count)


class _Writers:
    """Threads that write windows and give their slabs back.

    Threads of our own rather than an executor's: those take no work once the interpreter is about to exit, and a save
    under way is to be finished then.
    """

    def __init__(self, upload: Upload, give: Callable[[memoryview], None], threads: int) -> None:
        self._upload, self._give = upload, give
        self._windows: queue.SimpleQueue[tuple[int, memoryview, int] | None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._given_up = False
        self._threads_max = threads
        self._threads: list[threading.Thread] = []

    def write(self, offset: int, slab: memoryview, count: int) -> None:
        """Have the first bytes of a slab written; the slab is given back whatever comes of it."""
        if len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name="holdfast-write")
            try:
                thread.start()
            except RuntimeError:
                # The host has no thread to spare, or the interpreter is exiting (Python 3.12.0 starts none then).
                self._threads_max = len(self._threads)
            else:
                self._threads.append(thread)
        if self._threads:
            self._windows.put((offset, slab, count))
        else:
            self._settle(offset, slab, count)

    def raise_failure(self) -> None:
        """Raise what the first failed window met."""
        if self._failures:
            raise self._failures[0]

    def end(self, *, give_up: bool) -> None:
        """Return once nothing is under way any more; what is still queued is written, or given up."""
        self._given_up |= give_up
        for _ in self._threads:
            self._windows.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (window := self._windows.get()) is not None:
            self._settle(*window)

    def _settle(self, offset: int, slab: memoryview, count: int) -> None:
        try:
            if not self._given_up and not self._failures:
                self._upload.write(offset, slab[:count])
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._failures.append(error)
        finally:
            self._give(slab)
