"""Export: writes a checkpoint as another system's files, window by window, within a memory budget.

The format lays the files out. A plan cuts the files into windows. Workers, one or several processes, fill the windows
and upload each to the place of the export; their number does not change the files. On a disk a window is a part of a
file, and a store takes files whole. The place records durable windows, so a later process continues after an
interruption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property

from holdfast.base.clock import Clock
from holdfast.base.geometry.box import Box
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.types.export import DoneWindow, ExportFile, ExportWindow, WindowPlan
from holdfast.core.engine.target import HostTarget
from holdfast.core.format.names import is_coded_pack_name
from holdfast.core.plan.reads import longest_read
from holdfast.errors import ConflictError, InvalidError
from holdfast.offline.export.crc32 import checksums_of
from holdfast.offline.export.place import ExportPlace
from holdfast.offline.export.request import ExportReport, ExportRequest, ExportShare, OnWindow, WorkerPool
from holdfast.offline.export.window_writer import READS_IN_FLIGHT, WINDOWS, ExportSource, WindowWriter
from holdfast.offline.export.windows import FilePlan, share_of, windows_of
from holdfast.settings import MIB, PAGE_BYTES
from holdfast.stored.checkpoint.checkpoint import Checkpoint

MEMORY_BYTES_MIN = 64 * MIB
"""Memory of one worker, at least: enough for its reads and writes in flight."""

_WINDOW_BYTES_MIN = 1 * MIB
_READ_BYTES_MAX = 8 * MIB
_NOTHING = Box((0,), (0,))

_CAST_BYTES = 8 * MIB
"""Memory for casts, of all reads in flight together."""


class Export:
    """The export of one checkpoint to one place."""

    def __init__(
        self, checkpoint: Checkpoint, place: ExportPlace, to: str, files: Sequence[ExportFile], clock: Clock
    ) -> None:
        """Plan every file; writes nothing.

        Args:
            checkpoint: The source.
            place: Where the files go.
            to: Name of the format.
            files: The files, as the format laid them out.
            clock: Times the work, and makes random names.
        Raises:
            InvalidError: The format laid a file out wrongly.
        """
        self._checkpoint, self.place, self._format, self.files, self._clock = checkpoint, place, to, files, clock
        self._bytes = sum(file.bytes for file in files)
        self._plans = [FilePlan(file) for file in files]

    @cached_property
    def fingerprint(self) -> str:
        """A string that changes with the checkpoint's content and with the layout of the files."""
        digest = hashlib.sha256(self._checkpoint.identity.encode())
        for file in self.files:
            # Item by item: a million tensors, or DCP's metadata for them, would make one text too large.
            for item in ((file.name, file.bytes), *file.tensors, *file.checksums):
                digest.update(repr(item).encode("utf-8", "surrogatepass"))
            for at, data in file.literals:
                digest.update(b"%d %d " % (at, len(data)) + hashlib.sha256(data).digest())
        return digest.hexdigest()

    def run(
        self, request: ExportRequest, pool: WorkerPool | None = None, observer: Observer | None = None
    ) -> ExportReport:
        """Write the files, or continue an interrupted call, and publish them.

        Args:
            request: Memory and workers.
            pool: Executes shares in processes of their own; None: this process executes them.
            observer: Receives progress.
        Raises:
            ConflictError: The destination exists, another process exports to it, or the source was rewritten
                meanwhile; nothing was published.
            UnavailableError: There is no room, or storage failed; durable windows are kept.
        """
        started, place, read_bytes = self._clock.monotonic_seconds(), self.place, 0
        window_bytes, is_in_parts = self._window_bytes(request)
        with self._checkpoint.blaming_overwrite(), place.claimed(self.fingerprint, self.files, self._clock) as claim:
            if claim.is_published:
                return self._report(started, self._bytes, 0)
            resumed_bytes = sum(done.window.bytes for done in claim.done)
            progress = ByteProgress(self._bytes, observer)
            progress.add(resumed_bytes)

            def on_window(written: int, read: int) -> None:
                nonlocal read_bytes
                read_bytes += read
                progress.add(written)

            for workers, left_out in self._stages(request.workers, is_in_parts=is_in_parts):
                shares = [
                    ExportShare(
                        number=number,
                        count=workers,
                        window_bytes=window_bytes,
                        memory_bytes=request.memory_bytes // workers,
                        done=(*_ranges(claim.done), *left_out),
                        journal=claim.journal,
                        fingerprint=self.fingerprint,
                    )
                    for number in range(workers)
                ]
                if pool is not None and workers > 1:
                    pool(shares, on_window)
                else:
                    for share in shares:
                        self.execute(share, on_window)
                self._checkpoint.require_unchanged()
            if is_in_parts:
                self._write_checksums(place.recorded(claim.journal))
            place.publish()
        return self._report(started, resumed_bytes, read_bytes, begun_anew=claim.begun_anew)

    def execute(self, share: ExportShare, on_window: OnWindow) -> None:
        """Write a share's windows; return once all are durable and recorded.

        Raises:
            ConflictError: The source has changed since the share was made.
            CheckpointError: A read or write failed; every record stays valid.
        """
        if share.fingerprint != self.fingerprint:
            raise ConflictError(f"{self._checkpoint.url}: changed while it was exported; run the same command again")
        windows = share_of(windows_of(self.files, share.window_bytes, share.done), share.number, share.count)
        if windows:
            longest = max(window.bytes for window in windows)
            read_bytes, read_bytes_max = self._read_bytes(share.memory_bytes)
            buffers = min(max(self._room_for_windows(share.memory_bytes) // longest, 1), WINDOWS)
            checkpoint = self._checkpoint
            dtypes = {fqn: spec.dtype for fqn, spec in checkpoint.viewed.tensors.items()}
            source = ExportSource(
                dtypes,
                checkpoint.packs,
                checkpoint.settings,
                checkpoint.codecs,
                read_bytes_max,
                checkpoint.viewed.stored,
            )
            writer = WindowWriter(self.place, self.files, share.journal, on_window, self._clock, buffers, longest)
            writer.execute(self._window_plans(windows, read_bytes), source)
        self._checkpoint.require_unchanged()

    def _window_bytes(self, request: ExportRequest) -> tuple[int, bool]:
        """Return the bytes of a window, at most, and whether files are written in parts.

        The windows keep each worker within its part of the memory budget. A chunk on a window's edge is read twice, so
        large windows read less. Small windows overlap reads and writes.

        Raises:
            InvalidError: The memory is too little.
        """
        worker_bytes = request.memory_bytes // request.workers
        if worker_bytes < MEMORY_BYTES_MIN:
            raise InvalidError(
                f"memory: {request.memory_bytes} bytes for {request.workers} workers; expected at least "
                f"{MEMORY_BYTES_MIN} for each"
            )
        whole = self.place.whole_file_bytes(self.files, worker_bytes)
        if whole is not None:
            return whole, False
        wanted = max(self._bytes // (8 * request.workers), 16 * MIB)
        window_bytes = max(min(self._room_for_windows(worker_bytes) // WINDOWS, wanted), _WINDOW_BYTES_MIN)
        return min(window_bytes, request.window_bytes_max) // PAGE_BYTES * PAGE_BYTES, True

    def _stages(self, workers: int, *, is_in_parts: bool) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Yield, for each stage of the work, its workers and the files that it leaves out.

        Files that are sent whole appear one by one. Those by which readers find the others are a stage of their own,
        the last one.
        """
        last = [] if is_in_parts else [number for number, file in enumerate(self.files) if file.completes]
        yield workers, [(number, 0, self.files[number].bytes) for number in last]
        if last:
            yield 1, [(number, 0, file.bytes) for number, file in enumerate(self.files) if number not in last]

    def _read_bytes(self, memory_bytes: int) -> tuple[int, int]:
        """Return the bytes of a read, at most, and the memory that the longest one needs."""
        read_bytes = min(max(memory_bytes // 32, MIB), _READ_BYTES_MAX) // PAGE_BYTES * PAGE_BYTES
        coded = any(is_coded_pack_name(pack.name) for pack in self._checkpoint.manifest.packs)
        return read_bytes, longest_read(read_bytes, self._checkpoint.index.chunk_bytes, coded=coded)

    def _room_for_windows(self, memory_bytes: int) -> int:
        """Return the memory of a worker that reads and casts leave for windows."""
        return memory_bytes - READS_IN_FLIGHT * self._read_bytes(memory_bytes)[1] - _CAST_BYTES

    def _window_plans(self, windows: Sequence[ExportWindow], read_bytes: int) -> Iterator[WindowPlan]:
        for window in windows:
            plan, start, stop = self._plans[window.file], window.start, window.stop
            fills = tuple(plan.fills(start, stop))
            # The memory of a window comes later.
            wanted = [(fill.tensor.fqn, fill.box, HostTarget(fill.tensor.dtype, _NOTHING)) for fill in fills]
            reads, _ = self._checkpoint.reads_for(wanted, read_bytes)
            yield WindowPlan(window, tuple(plan.literals(start, stop)), fills, reads, tuple(plan.sums(start, stop)))

    def _write_checksums(self, done: Sequence[DoneWindow]) -> None:
        """Write the checksums of files that were written in parts: a checksum needs the sums of all windows."""
        left = windows_of(self.files, MIB, _ranges(done))
        assert not left, f"{len(left)} windows were left out, the first {left[0]}"
        sums: dict[int, list[tuple[int, int, int, int]]] = {}
        for each in done:
            sums.setdefault(each.window.file, []).extend(each.sums)
        for number, file in enumerate(self.files):
            if file.checksums:
                upload = self.place.upload(file)
                try:
                    for at, crc in checksums_of(file, sums.get(number, ())):
                        upload.write(at, memoryview(crc))
                    upload.complete()
                finally:
                    upload.abort()

    def _report(self, started: float, resumed_bytes: int, read_bytes: int, *, begun_anew: bool = False) -> ExportReport:
        return ExportReport(
            url=self.place.url,
            format=self._format,
            files={file.name: file.bytes for file in self.files},
            resumed_bytes=resumed_bytes,
            read_bytes=read_bytes,
            seconds=self._clock.monotonic_seconds() - started,
            begun_anew=begun_anew,
        )


def _ranges(done: Sequence[DoneWindow]) -> tuple[tuple[int, int, int], ...]:
    return tuple((each.window.file, each.window.start, each.window.stop) for each in done)
