"""Windows of another system's files: filled from a checkpoint, written, made durable, written down."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from holdfast.clock import Clock
from holdfast.engine.buffers import BufferPool
from holdfast.engine.casting import cast
from holdfast.engine.read import execute
from holdfast.errors import CheckpointError
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.offline.export.destination import OutputFile
from holdfast.ports.framework import Target
from holdfast.ports.store import Packs
from holdfast.settings import MIB, Settings
from holdfast.types.export import ExportWindow, Fill, WindowPlan

WINDOWS = 4
"""Windows that exist at once: one is filled while others are written or wait for it."""

_WRITERS = 2
_WRITE_BYTES = 8 * MIB
_CAST_ELEMENTS = 1 << 16
"""Elements cast at once: what comes between stays in the processor's cache, and is nothing beside a window."""

_SYNC_SECONDS = 1.0
"""What a crash costs at most, in time; to sync each window would have the disk wait for every one."""


@dataclass(frozen=True, slots=True)
class DoneWindow:
    """A window that is durable."""

    window: ExportWindow
    """Where it lies."""

    sums: tuple[tuple[int, int, int, int], ...]
    """Number of a checksum, first byte and byte past the last in the file, and their CRC-32."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What windows are filled from."""

    dtypes: Mapping[str, str]
    """What every tensor is stored as, by FQN."""

    packs: Packs
    """Where its packs lie."""

    settings: Settings
    """How it is read."""

    read_buffer_bytes: int
    """What the longest read needs."""


class WindowWriter:
    """Fills and writes windows through a fixed set of buffers."""

    def __init__(
        self,
        files: Callable[[int], OutputFile],
        durable: Callable[[Sequence[DoneWindow]], None],
        written: Callable[[int, int], None],
        clock: Clock,
        window_bytes: int,
    ) -> None:
        """Allocate the buffers.

        Args:
            files: Opens the file of a number.
            durable: Told of windows once they are durable, in groups.
            written: Told of a window's bytes, and of the bytes read for it, once it was written.
            clock: For the time between two groups.
            window_bytes: What a window has at most.
        """
        self._files, self._durable, self._told, self._clock = files, durable, written, clock
        self._buffers = BufferPool(WINDOWS, window_bytes)
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[DoneWindow, OutputFile]] = []
        self._synced_at = clock.monotonic_seconds()

    def execute(self, windows: Iterable[WindowPlan], source: ExportSource) -> None:
        """Fill and write every window, and return once all are durable.

        What is durable when it fails has been told.

        Raises:
            CheckpointError: Something could not be read or written.
        """
        read_buffers = BufferPool(source.settings.windows_in_flight, source.read_buffer_bytes)
        writes: list[Future[None]] = []
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="holdfast-export") as threads:
            try:
                for plan in windows:
                    for each in [each for each in writes if each.done()]:
                        each.result()
                        writes.remove(each)
                    buffer = self._buffers.take()
                    try:
                        done = _filled(plan, buffer, source, read_buffers)
                    except BaseException:
                        self._buffers.give(buffer)
                        raise
                    writes.append(threads.submit(self._write, done, buffer, plan.reads.bytes))
                for each in writes:
                    each.result()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                with suppress(CheckpointError):
                    self._sync()  # So that the next try need not do again what this one has done.
                raise
        self._sync()

    def _write(self, done: DoneWindow, buffer: memoryview, read_bytes: int) -> None:
        window = done.window
        try:
            file = self._files(window.file)
            try:
                for at in range(0, window.bytes, _WRITE_BYTES):
                    file.write(window.start + at, buffer[at : min(at + _WRITE_BYTES, window.bytes)])
            except BaseException:
                file.close()
                raise
        finally:
            self._buffers.give(buffer)
        with self._lock:
            self._waiting.append((done, file))
            due = self._clock.monotonic_seconds() - self._synced_at >= _SYNC_SECONDS
        self._told(window.bytes, read_bytes)
        if due and self._syncing.acquire(blocking=False):
            try:
                self._sync_waiting()
            finally:
                self._syncing.release()

    def _sync(self) -> None:
        with self._syncing:
            self._sync_waiting()

    def _sync_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        try:
            for _, file in waiting:
                file.sync()
        finally:
            for _, file in waiting:
                file.close()
        if waiting:
            self._durable([done for done, _ in waiting])
        with self._lock:
            self._synced_at = self._clock.monotonic_seconds()


def _filled(plan: WindowPlan, buffer: memoryview, source: ExportSource, read_buffers: BufferPool) -> DoneWindow:
    """Fill a buffer with a window's bytes."""
    window = plan.window
    memory = buffer[: window.bytes]
    for start, stop in _gaps(plan):
        np.frombuffer(memory[start:stop], np.uint8)[:] = 0
    for at, data in plan.literals:
        memory[at : at + len(data)] = data
    targets = [_target(fill, memory, source.dtypes[fill.tensor.fqn]) for fill in plan.fills]
    execute(plan.reads, source.packs, targets, source.settings, read_buffers)
    for fill, target in zip(plan.fills, targets, strict=True):
        if target.cut is not None:
            memory[fill.at : fill.at + fill.bytes] = target.cut[fill.skipped : fill.skipped + fill.bytes]
    sums = [
        (number, start, stop, zlib.crc32(memory[start - window.start : stop - window.start]))
        for number, start, stop in plan.sums
    ]
    return DoneWindow(window, tuple(sums))


def _gaps(plan: WindowPlan) -> Iterator[tuple[int, int]]:
    """Yield the runs of a window that nothing goes into."""
    runs = [(at, at + len(data)) for at, data in plan.literals]
    runs += [(fill.at, fill.at + fill.bytes) for fill in plan.fills]
    at = 0
    for start, stop in [*sorted(runs), (plan.window.bytes, plan.window.bytes)]:
        if at < start:
            yield at, start
        at = stop


def _target(fill: Fill, memory: memoryview, stored: str) -> WindowTarget:
    itemsize = DTYPES[fill.tensor.dtype].itemsize
    if fill.bytes == fill.box.numel * itemsize:
        return WindowTarget(fill, stored, memory[fill.at : fill.at + fill.bytes], cut=None)
    element = memoryview(bytearray(itemsize))
    return WindowTarget(fill, stored, element, cut=element)


class WindowTarget(Target):
    """A box of a tensor in the memory of a window, cast to what the file has."""

    def __init__(self, fill: Fill, stored: str, memory: memoryview, cut: memoryview | None) -> None:
        self._stored, self._dtype, self._box = stored, fill.tensor.dtype, fill.box
        self.cut = cut
        """The one element, where the window has only some of its bytes."""
        self._array: NDArray[np.generic] = np.frombuffer(memory, DTYPES[self._dtype].numpy).reshape(fill.box.shape)

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box`."""
        stored = np.frombuffer(source, DTYPES[self._stored].numpy).reshape(source_box.shape)
        into, found = self._part(part), _within(stored, part, source_box)
        if self._stored == self._dtype:
            into[...] = found
        else:
            _cast_into(into, found, self._stored, self._dtype)

    def memory(self, part: Box) -> memoryview | None:
        """Return the bytes of `part` if they are one run of the window, as they are stored."""
        run = self._part(part)
        if self._stored != self._dtype or not run.flags.c_contiguous:
            return None
        return run.reshape(-1).view(np.uint8).data

    def _part(self, part: Box) -> NDArray[np.generic]:
        return _within(self._array, part, self._box)


def _within(array: NDArray[np.generic], part: Box, box: Box) -> NDArray[np.generic]:
    """Return a part of the box that an array holds, as a view."""
    selected: tuple[slice | EllipsisType, ...] = (*part.relative_to(box.start), ...)
    # The Ellipsis keeps what has no dimension an array; numpy would make a scalar of it.
    return array[selected]


def _cast_into(into: NDArray[np.generic], found: NDArray[np.generic], stored: str, dtype: str) -> None:
    """Cast a part, a few elements at a time."""
    if into.size <= _CAST_ELEMENTS or not into.ndim:
        into[...] = cast(found, stored, dtype)
        return
    rows = max(_CAST_ELEMENTS * len(into) // into.size, 1)
    for at in range(0, len(into), rows):
        if rows == 1:
            _cast_into(into[at], found[at], stored, dtype)
        else:
            into[at : at + rows] = cast(found[at : at + rows], stored, dtype)
