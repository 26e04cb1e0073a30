"""Fills windows of another system's files from a checkpoint, writes them and makes them durable."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from holdfast.base.clock import Clock
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import Packs
from holdfast.base.types.export import ExportWindow, Fill, WindowPlan
from holdfast.core.engine.buffers import BufferPool
from holdfast.core.engine.casting import cast
from holdfast.core.engine.read import ReadPool, execute
from holdfast.errors import CheckpointError
from holdfast.offline.export.destination import OutputFile
from holdfast.settings import MIB, Settings

WINDOWS = 4
"""Windows in memory at once: one is filled while others are written or wait to be."""

READS_IN_FLIGHT = 4
"""Reads at once; each has a buffer for the longest read."""

_WRITERS = 2
_WRITE_BYTES = 8 * MIB
_CAST_ELEMENTS = 1 << 16
"""Elements cast at once: the intermediate array stays in the processor's cache and is small beside a window."""

_SYNC_SECONDS = 1.0
"""Work that a crash loses, at most. A sync for each window would make the disk wait for every one."""


@dataclass(frozen=True, slots=True)
class DoneWindow:
    """A window that is durable."""

    window: ExportWindow
    """Its range of the file."""

    sums: tuple[tuple[int, int, int, int], ...]
    """Number of a checksum, start and stop in the file, and the CRC-32 of that range."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """The checkpoint from which windows are filled."""

    dtypes: Mapping[str, str]
    """Stored dtype of every tensor, by FQN."""

    packs: Packs
    """Locates its packs by name."""

    settings: Settings
    """Size from which on chunks are read straight into windows."""

    codecs: Codecs
    """What decodes coded chunks."""

    read_bytes_max: int
    """Memory for the longest read."""


class WindowWriter:
    """Fills and writes windows through a fixed set of buffers."""

    def __init__(
        self,
        files: Callable[[int], OutputFile],
        on_durable: Callable[[Sequence[DoneWindow]], None],
        on_window: Callable[[int, int], None],
        clock: Clock,
        window_bytes: int,
    ) -> None:
        """Allocate the buffers.

        Args:
            files: Opens a file by number.
            on_durable: Called with windows once they are durable, in groups.
            on_window: Called with the bytes of a written window and the bytes read for it, one call at a time.
            clock: Times the groups.
            window_bytes: Bytes of a window, at most.
        """
        self._files, self._on_durable, self._on_window, self._clock = files, on_durable, on_window, clock
        self._buffers = BufferPool(WINDOWS, window_bytes)
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[DoneWindow, OutputFile]] = []
        self._synced_at = clock.monotonic_seconds()

    def execute(self, windows: Iterable[WindowPlan], source: ExportSource) -> None:
        """Fill and write every window; return once all are durable.

        If it fails, `on_durable` has been called for every durable window.

        Raises:
            CheckpointError: A read or write failed.
        """
        writes: list[Future[None]] = []
        with (
            ReadPool(READS_IN_FLIGHT, source.read_bytes_max) as reads,
            ThreadPoolExecutor(_WRITERS, thread_name_prefix="holdfast-export") as threads,
        ):
            try:
                for plan in windows:
                    # A failed write ends the export now, not after all windows.
                    for write in [write for write in writes if write.done()]:
                        write.result()
                        writes.remove(write)
                    buffer = self._buffers.take()
                    try:
                        done = fill(plan, buffer, source, reads)
                    except BaseException:
                        self._buffers.give(buffer)
                        raise
                    writes.append(threads.submit(self._write, done, buffer, plan.reads.bytes))
                for write in writes:
                    write.result()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                with suppress(CheckpointError):
                    self._sync()  # The next call need not repeat what this one has written.
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
            # Under the lock, because `on_window` accepts one call at a time.
            self._on_window(window.bytes, read_bytes)
        if due:
            self._sync(blocking=False)

    def _sync(self, *, blocking: bool = True) -> None:
        """Make the written windows durable. If another thread does so, wait for it first; if not `blocking`, return."""
        if not self._syncing.acquire(blocking=blocking):
            return
        with ExitStack() as cleanup:
            cleanup.callback(self._syncing.release)
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for _, file in waiting:
                cleanup.callback(file.close)
            for _, file in waiting:
                file.sync()
            if waiting:
                self._on_durable([done for done, _ in waiting])
            with self._lock:
                self._synced_at = self._clock.monotonic_seconds()


def fill(plan: WindowPlan, buffer: memoryview, source: ExportSource, reads: ReadPool) -> DoneWindow:
    """Fill a buffer with a window's bytes, and return the window with its part of every checksum.

    Raises:
        CheckpointError: A read failed.
    """
    window = plan.window
    memory = buffer[: window.bytes]
    for start, stop in _gaps(plan):
        np.frombuffer(memory[start:stop], np.uint8)[:] = 0
    for at, data in plan.literals:
        memory[at : at + len(data)] = data
    targets = [_target(fill, memory, source.dtypes[fill.tensor.fqn]) for fill in plan.fills]
    execute(plan.reads, source.packs, targets, source.settings, source.codecs, reads)
    for fill, target in zip(plan.fills, targets, strict=True):
        if target.cut is not None:
            memory[fill.at : fill.at + fill.bytes] = target.cut[fill.skipped : fill.skipped + fill.bytes]
    sums = [
        (number, start, stop, zlib.crc32(memory[start - window.start : stop - window.start]))
        for number, start, stop in plan.sums
    ]
    return DoneWindow(window, tuple(sums))


def _gaps(plan: WindowPlan) -> Iterator[tuple[int, int]]:
    """Yield the runs of a window that neither literals nor tensors fill."""
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
    """A box of a tensor in the memory of a window, cast to the dtype of the file."""

    def __init__(self, fill: Fill, stored: str, memory: memoryview, cut: memoryview | None) -> None:
        self._stored, self._dtype, self._box = stored, fill.tensor.dtype, fill.box
        self.cut = cut
        """Memory of the one element, if the window has only some of its bytes; None otherwise."""
        self._array: NDArray[np.generic] = np.frombuffer(memory, DTYPES[self._dtype].numpy).reshape(fill.box.shape)

    def place(self, part: Box, source: memoryview, source_box: Box) -> None:
        """Copy `part` out of the row-major bytes of `source_box`."""
        stored = np.frombuffer(source, DTYPES[self._stored].numpy).reshape(source_box.shape)
        into, elements = _within(self._array, part, self._box), _within(stored, part, source_box)
        if self._stored == self._dtype:
            into[...] = elements
        else:
            _cast_into(into, elements, self._stored, self._dtype)

    def memory(self, part: Box) -> memoryview | None:
        """Return the memory of `part` if it is one run of the window and needs no cast."""
        run = _within(self._array, part, self._box)
        if self._stored != self._dtype or not run.flags.c_contiguous:
            return None
        return run.reshape(-1).view(np.uint8).data


def _within(array: NDArray[np.generic], part: Box, box: Box) -> NDArray[np.generic]:
    """Return a part of the box in an array, as a view."""
    selected: tuple[slice | EllipsisType, ...] = (*part.relative_to(box.start), ...)
    # The Ellipsis keeps a 0-d part an array; numpy would return a scalar.
    return array[selected]


def _cast_into(into: NDArray[np.generic], elements: NDArray[np.generic], stored: str, dtype: str) -> None:
    """Cast a part, at most `_CAST_ELEMENTS` at a time."""
    if into.size <= _CAST_ELEMENTS or not into.ndim:
        into[...] = cast(elements, stored, dtype)
        return
    rows = max(_CAST_ELEMENTS * len(into) // into.size, 1)
    for at in range(0, len(into), rows):
        if rows == 1:
            _cast_into(into[at], elements[at], stored, dtype)
        else:
            into[at : at + rows] = cast(elements[at : at + rows], stored, dtype)
