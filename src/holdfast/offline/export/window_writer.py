"""Fills windows of another system's files from a checkpoint, writes them and makes them durable."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

from holdfast.base.clock import Clock
from holdfast.base.geometry.box import Box, grid_within
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.framework import Target
from holdfast.base.ports.packs import Packs
from holdfast.base.ports.store import Upload
from holdfast.base.types.export import DoneWindow, ExportFile, Fill, WindowPlan
from holdfast.core.engine.buffers import BufferPool
from holdfast.core.engine.casting import cast
from holdfast.core.engine.read import ReadPool, execute
from holdfast.errors import CheckpointError
from holdfast.offline.export.crc32 import checksums_of
from holdfast.offline.export.place import ExportPlace
from holdfast.offline.export.request import OnWindow
from holdfast.settings import Settings

WINDOWS = 4
"""Windows in memory at once: one is filled while others are written or wait to be."""

READS_IN_FLIGHT = 4
"""Reads at once; each has a buffer for the longest read."""

_WRITERS = 8
"""Windows that are written at once."""

_CAST_ELEMENTS = 1 << 16
"""Elements cast at once: the intermediate array stays in the processor's cache and is small beside a window."""

_RECORD_SECONDS = 1.0
"""Work that a crash loses, at most. A sync for each window would make the disk wait for every one."""


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

    stored: Callable[[str, Box, Target], Iterable[tuple[str, Box, Target]]]
    """Returns the stored boxes that fill a box, each with its target, in the order of the reads."""


class WindowWriter:
    """Fills one window after the other, while threads write those that are filled."""

    def __init__(
        self,
        place: ExportPlace,
        files: Sequence[ExportFile],
        journal: str,
        on_window: OnWindow,
        clock: Clock,
        buffers: int,
        window_bytes: int,
    ) -> None:
        """Begin with no window.

        Args:
            place, files: The place of the export, and its files.
            journal: Where the place records durable windows.
            on_window: Called for every window once it is written, one call at a time.
            clock: Times the records.
            buffers, window_bytes: Count and size of buffers, for a place that lends no memory.
        """
        self._place, self._files, self._journal, self._on_window = place, files, journal, on_window
        self._clock, self._buffer_sizes = clock, (buffers, window_bytes)
        self._lock = threading.Lock()
        self._written: list[tuple[DoneWindow, Upload | None]] = []
        """Windows that are written and not recorded; with the upload of a window that is not durable."""
        self._recorded_at = clock.monotonic_seconds()

    def execute(self, plans: Iterable[WindowPlan], source: ExportSource) -> None:
        """Fill and write every window; return once all are durable and recorded.

        If a window fails, or the caller is interrupted, those written before are recorded.

        Raises:
            CheckpointError: A read or write failed.
        """
        writes: dict[Future[None], Upload] = {}
        with (
            ReadPool(READS_IN_FLIGHT, source.read_bytes_max) as reads,
            ThreadPoolExecutor(_WRITERS, thread_name_prefix="holdfast-export") as threads,
        ):
            try:
                for plan in plans:
                    # A failed write ends the export now, not after all windows.
                    for write in [write for write in writes if write.done()]:
                        write.result()
                        del writes[write]
                    upload = self._place.upload(self._files[plan.window.file])
                    try:
                        done, memory, is_lent = self._fill(plan, upload, source, reads)
                        write = threads.submit(self._write, upload, done, memory, is_lent, plan.reads.bytes)
                    except BaseException:
                        upload.abort()
                        raise
                    writes[write] = upload
                for write in writes:
                    write.result()
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                for write, upload in writes.items():
                    if write.cancelled():
                        upload.abort()
                with suppress(CheckpointError):
                    self._record()  # The next call need not repeat what this one has written.
                raise
        self._record()

    @cached_property
    def _buffers(self) -> BufferPool:
        return BufferPool(*self._buffer_sizes)

    def _fill(
        self, plan: WindowPlan, upload: Upload, source: ExportSource, reads: ReadPool
    ) -> tuple[DoneWindow, memoryview, bool]:
        """Fill memory of the upload, or a buffer; wait until there is some.

        Returns:
            The window, memory that begins with its bytes, and whether the memory is that of the upload.
        """
        lent = upload.room(plan.window.start, plan.window.bytes)
        memory = self._buffers.take() if lent is None else lent
        done = fill(plan, memory, source, reads)
        if self._is_whole(done):
            for at, crc in checksums_of(self._files[plan.window.file], done.sums):
                memory[at : at + 4] = crc
        return done, memory, lent is not None

    def _is_whole(self, done: DoneWindow) -> bool:
        """Return whether a window is its whole file."""
        return done.window.bytes == self._files[done.window.file].bytes

    def _write(self, upload: Upload, done: DoneWindow, memory: memoryview, is_lent: bool, read_bytes: int) -> None:
        is_whole = self._is_whole(done)
        try:
            upload.write(done.window.start, memory[: done.window.bytes])
            if is_whole:
                upload.complete()
        except BaseException:
            upload.abort()
            raise
        finally:
            if not is_lent:
                self._buffers.give(memory)
        with self._lock:
            self._written.append((done, None if is_whole else upload))
            self._on_window(done.window.bytes, read_bytes)
            if self._clock.monotonic_seconds() - self._recorded_at >= _RECORD_SECONDS:
                self._record()

    def _record(self) -> None:
        """Make the written windows durable, and record them. One thread at a time."""
        written, self._written = self._written, []
        parts = [upload for _, upload in written if upload is not None]
        try:
            for upload in parts:
                upload.complete()
        finally:
            for upload in parts:
                upload.abort()  # Has no effect on those that are complete.
        if written:
            self._place.record(self._journal, [done for done, _ in written])
        self._recorded_at = self._clock.monotonic_seconds()


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
    fills = zip(plan.fills, targets, strict=True)
    parts = [part for fill, target in fills for _, _, part in source.stored(fill.tensor.fqn, fill.box, target)]
    execute(plan.reads, source.packs, parts, source.settings, source.codecs, reads)
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
        self._fill(_within(self._array, part, self._box), _within(stored, part, source_box))

    def put(self, at: Sequence[slice], elements: NDArray[np.generic]) -> None:
        """Copy elements of a grid into the window."""
        self._fill(self._array[grid_within(at, self._box)], elements)

    def _fill(self, into: NDArray[np.generic], elements: NDArray[np.generic]) -> None:
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
