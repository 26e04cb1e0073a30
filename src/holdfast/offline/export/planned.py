"""What every export has: the layout of its files, and the reads that fill them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.base.clock import Clock
from holdfast.base.ports.foreign import Writer
from holdfast.base.ports.observer import Observer
from holdfast.base.types.export import ExportFile, ExportOptions, ExportWindow, WindowPlan
from holdfast.base.types.plan import WantedBoxes
from holdfast.core.format.names import is_coded_pack_name
from holdfast.core.plan.reads import longest_read
from holdfast.errors import ConflictError, InvalidError
from holdfast.offline.export.window_writer import ExportSource
from holdfast.offline.export.windows import FilePlan
from holdfast.settings import MIB, PAGE_BYTES
from holdfast.stored.checkpoint.checkpoint import Checkpoint

OnWindow = Callable[[int, int], None]
"""Called for each window with the bytes written, and the bytes read for them."""

MEMORY_BYTES_MIN = 64 * MIB
"""Memory of one worker, at least: enough for its reads and writes in flight."""

_READ_BYTES_MAX = 8 * MIB
CAST_BYTES = 8 * MIB
"""Memory for casts, of all reads in flight together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Resources of an export."""

    memory_bytes: int
    """Memory for bytes in flight, of all workers together."""

    workers: int
    """Processes."""

    window_bytes_max: int = 128 * MIB
    """Bytes of one window, at most, a whole number of pages. Larger ones take too long to fill and to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did."""

    url: str
    """Its destination."""

    format: str
    """Name of the format."""

    files: Mapping[str, int]
    """Bytes of every file, by its name in the destination; the name is empty if the destination is one file."""

    resumed_bytes: int
    """Bytes that an earlier call had written."""

    read_bytes: int
    """Bytes that this call read from the checkpoint."""

    seconds: float
    """Duration of the call."""

    begun_anew: bool
    """Whether unfinished work was discarded: its source or options were different, or its files were gone."""

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportShare:
    """One worker's part of an export; plain values, for another process."""

    number: int
    """Number of the worker."""

    count: int
    """Count of workers."""

    window_bytes: int
    """Bytes of a window, at most; the same for all workers."""

    memory_bytes: int
    """This worker's part of the memory budget."""

    done: tuple[tuple[int, int, int], ...]
    """Ranges that were durable before any worker started: file number, start, stop."""

    journal: str
    """Name of the journal in which it records durable windows; empty where no journal is kept."""

    fingerprint: str
    """Fingerprint of the export."""


WorkerPool = Callable[[Sequence[ExportShare], OnWindow], None]
"""Executes every share, each in a process of its own."""


class PlannedExport:
    """The export of one checkpoint: what is written, wherever it goes."""

    def __init__(self, checkpoint: Checkpoint, writer: Writer, options: ExportOptions, clock: Clock) -> None:
        """Lay the files out; reads the index and writes nothing.

        Raises:
            InvalidError: The format cannot hold the checkpoint's content.
        """
        self._checkpoint, self._clock, self._format = checkpoint, clock, writer.name
        self.files: Sequence[ExportFile] = writer.files(checkpoint.content, options)
        """The files to write."""
        self._bytes = sum(file.bytes for file in self.files)
        self._plans = [FilePlan(file) for file in self.files]

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
        """Write the files, or continue an interrupted call.

        Args:
            request: Memory and workers.
            pool: Executes shares in processes of their own; None: this process executes them.
            observer: Receives progress.
        Raises:
            ConflictError: The destination exists, another process exports to it, or the source was rewritten
                meanwhile.
            UnavailableError: There is no room, or storage failed; what was written is kept.
        """
        raise NotImplementedError

    def execute(self, share: ExportShare, on_window: OnWindow) -> None:
        """Write a share's windows; return once all are durable.

        Raises:
            CheckpointError: A read or write failed.
        """
        raise NotImplementedError

    def _worker_bytes(self, request: ExportRequest) -> int:
        """Return the memory of one worker.

        Raises:
            InvalidError: It is too little.
        """
        worker_bytes = request.memory_bytes // request.workers
        if worker_bytes < MEMORY_BYTES_MIN:
            raise InvalidError(
                f"memory: {request.memory_bytes} bytes for {request.workers} workers; expected at least "
                f"{MEMORY_BYTES_MIN} for each"
            )
        return worker_bytes

    def _shares(
        self,
        request: ExportRequest,
        window_bytes: int,
        done: Sequence[tuple[int, int, int]],
        journals: Sequence[str],
    ) -> list[ExportShare]:
        """Return the part of each worker; the arguments are as in `ExportShare`."""
        return [
            ExportShare(
                number=number,
                count=request.workers,
                window_bytes=window_bytes,
                memory_bytes=request.memory_bytes // request.workers,
                done=tuple(done),
                journal=journal,
                fingerprint=self.fingerprint,
            )
            for number, journal in enumerate(journals)
        ]

    def _require_same(self, share: ExportShare) -> None:
        """Refuse a share of another export.

        Raises:
            ConflictError: The source has changed since the share was made.
        """
        if share.fingerprint != self.fingerprint:
            raise ConflictError(f"{self._checkpoint.url}: changed while it was exported; run the same command again")

    def _source(self, read_window_bytes: int) -> ExportSource:
        dtypes = {fqn: spec.dtype for fqn, spec in self._checkpoint.index.tensors.items()}
        checkpoint, longest = self._checkpoint, self._read_bytes_max(read_window_bytes)
        return ExportSource(dtypes, checkpoint.packs, checkpoint.settings, checkpoint.codecs, longest)

    def _read_window_bytes(self, memory_bytes: int) -> int:
        return min(max(memory_bytes // 32, MIB), _READ_BYTES_MAX) // PAGE_BYTES * PAGE_BYTES

    def _read_bytes_max(self, read_window_bytes: int) -> int:
        coded = any(map(is_coded_pack_name, (pack.name for pack in self._checkpoint.manifest.packs)))
        return longest_read(read_window_bytes, self._checkpoint.index.chunk_bytes, coded=coded)

    def _window_plans(self, windows: Sequence[ExportWindow], read_window_bytes: int) -> Iterator[WindowPlan]:
        for window in windows:
            plan, start, stop = self._plans[window.file], window.start, window.stop
            fills = tuple(plan.fills(start, stop))
            wanted = [WantedBoxes(fill.tensor.fqn, (fill.box,)) for fill in fills]
            reads = self._checkpoint.reads_for(wanted, read_window_bytes)
            yield WindowPlan(window, tuple(plan.literals(start, stop)), fills, reads, tuple(plan.sums(start, stop)))

    def _report(
        self, url: str, started: float, resumed_bytes: int, read_bytes: int, *, begun_anew: bool = False
    ) -> ExportReport:
        return ExportReport(
            url=url,
            format=self._format,
            files={file.name: file.bytes for file in self.files},
            resumed_bytes=resumed_bytes,
            read_bytes=read_bytes,
            seconds=self._clock.monotonic_seconds() - started,
            begun_anew=begun_anew,
        )
