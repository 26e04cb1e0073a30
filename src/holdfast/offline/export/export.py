"""Export: a checkpoint loaded into files that are another system's, window by window, under a budget of memory.

Which bytes lie where is the format's affair; which of them are made at once is a plan; who makes them, this process or
several beside each other, changes neither. What is durable is written down beside the work, so that a later process
goes on where this one was stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.clock import Clock
from holdfast.errors import ConflictError, CorruptError, InvalidError
from holdfast.offline.export.crc32 import joined_crc32
from holdfast.offline.export.destination import Destination, OutputFile
from holdfast.offline.export.window_writer import WINDOWS, DoneWindow, ExportSource, WindowWriter
from holdfast.offline.export.windows import FilePlan, share_of, windows_of
from holdfast.plan.reads import WantedBoxes
from holdfast.ports.foreign import Writer
from holdfast.ports.observer import Observer
from holdfast.settings import MIB, PAGE_BYTES, Settings
from holdfast.types.events import Progress
from holdfast.types.export import ExportContent, ExportFile, ExportOptions, ExportWindow, WindowPlan

logger = logging.getLogger(__name__)

Told = Callable[[int, int], None]
"""Told of bytes written, and of bytes read for them."""

MEMORY_BYTES_MIN = 64 * MIB
"""What a worker needs to have reads and writes in flight at all."""

_WINDOW_BYTES_MIN = 1 * MIB
_READ_BYTES_MAX = 8 * MIB
_CAST_BYTES = 8 * MIB
"""What is between stored and cast elements, in all reads in flight together."""


_JOURNAL = "journal-"
"""Begins the name of a journal; its number follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What the caller asked for."""

    memory_bytes: int
    """Memory for bytes on their way, of all workers together."""

    workers: int
    """Processes."""

    window_bytes_max: int = 128 * MIB
    """Bytes of one window, at most, a whole number of pages. Larger ones fill and drain too slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did."""

    url: str
    """Where it lies."""

    format: str
    """What it was written as."""

    files: Mapping[str, int]
    """Bytes of every file, by its name under the destination; by an empty one where that is the file."""

    resumed_bytes: int
    """Bytes that an earlier try had written already."""

    read_bytes: int
    """Bytes read of the checkpoint this time."""

    seconds: float
    """How long it took."""

    begun_anew: bool
    """Whether unfinished work was thrown away: it was of another source or other options, or its files were gone."""

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportShare:
    """What one worker does of an export; plain values, so that it can be told to another process."""

    number: int
    """Which worker."""

    count: int
    """How many there are."""

    window_bytes: int
    """What a window is at most; the same for all."""

    memory_bytes: int
    """This worker's part of the budget."""

    done: tuple[tuple[int, int, int], ...]
    """What was durable before any of them began: file number, first byte, byte past the last."""

    journal: str
    """Where it writes down what is durable."""

    fingerprint: str
    """Of the export that it is a share of."""


class Export:
    """One checkpoint on its way to one destination."""

    def __init__(
        self, checkpoint: Checkpoint, destination: Destination, writer: Writer, options: ExportOptions, clock: Clock
    ) -> None:
        """Lay the files out; reads the index and writes nothing.

        Raises:
            InvalidError: The format cannot hold what the checkpoint does.
        """
        self._checkpoint, self._destination, self._clock = checkpoint, destination, clock
        self.format = writer.name
        manifest = checkpoint.manifest
        content = ExportContent(checkpoint.index.tensors, manifest.aliases, manifest.tree)
        self.files: Sequence[ExportFile] = writer.files(content, options)
        """What is written."""
        self._plans = [FilePlan(file) for file in self.files]

    @cached_property
    def fingerprint(self) -> str:
        """What is another text for any other content or any other files."""
        found = hashlib.sha256(self._checkpoint.identity.encode())
        for file in self.files:
            # One by one: there may be a million tensors, and literals as large as what DCP keeps of them.
            for each in ((file.name, file.bytes), *file.tensors, *file.checksums):
                found.update(repr(each).encode("utf-8", "surrogatepass"))
            for at, data in file.literals:
                found.update(b"%d %d " % (at, len(data)) + hashlib.sha256(data).digest())
        return found.hexdigest()

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)

    def execute(self, share: ExportShare, told: Told) -> None:
        """Make a share's windows, and return once all are durable and written down.

        Raises:
            CheckpointError: Something could not be read or written; what is written down stays true.
        """
        if share.fingerprint != self.fingerprint:
            raise ConflictError(f"{self._checkpoint.url}: changed while it was exported; run the same command again")
        settings = self._reading(share.memory_bytes)
        windows = share_of(windows_of(self.files, share.window_bytes, share.done), share.number, share.count)
        dtypes = {fqn: spec.dtype for fqn, spec in self._checkpoint.index.tensors.items()}
        source = ExportSource(dtypes, self._checkpoint.packs, settings, self._read_buffer_bytes(settings))
        if not windows:
            return
        journal = self._destination.journal(share.journal)
        try:
            longest = max(window.bytes for window in windows)
            writer = WindowWriter(self._open, lambda done: journal.append(_encode(done)), told, self._clock, longest)
            writer.execute(self._window_plans(windows, settings), source)
        finally:
            journal.close()
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Refuse what was made of a source that was written again meanwhile.

        Raises:
            ConflictError: Names the file; the same command begins anew.
        """
        self._checkpoint.require_unchanged()

    def finish(self, done: Sequence[DoneWindow]) -> None:
        """Write the checksums, which are known now that everything else is durable."""
        left = windows_of(self.files, MIB, _ranges(done))
        assert not left, f"{len(left)} windows were left out, the first {left[0]}"
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for each in done:
            for number, start, stop, crc in each.sums:
                parts.setdefault((each.window.file, number), []).append((start, stop, crc))
        for file_number, file in enumerate(self.files):
            if not file.checksums:
                continue
            output = self._open(file_number)
            try:
                for number, checksum in enumerate(file.checksums):
                    crc = joined_crc32(parts.get((file_number, number), ()), checksum.start, checksum.stop)
                    for at in checksum.at:
                        output.write(at, memoryview(crc.to_bytes(4, "little")))
                output.sync()
            finally:
                output.close()

    def window_bytes(self, request: ExportRequest) -> int:
        """Return what a window is at most, so that each worker keeps within its part of the budget.

        Large windows cut fewer chunks, which are read twice then; small ones let reading and writing go on together.
        """
        own = request.memory_bytes // request.workers
        if own < MEMORY_BYTES_MIN:
            raise InvalidError(
                f"memory: {request.memory_bytes} bytes for {request.workers} workers; expected at least "
                f"{MEMORY_BYTES_MIN} for each"
            )
        settings = self._reading(own)
        reads = settings.windows_in_flight * self._read_buffer_bytes(settings)
        room = (own - reads - _CAST_BYTES) // WINDOWS
        wanted = max(self.bytes // (8 * request.workers), 16 * MIB)
        return min(max(min(room, wanted), _WINDOW_BYTES_MIN), request.window_bytes_max) // PAGE_BYTES * PAGE_BYTES

    def _reading(self, memory_bytes: int) -> Settings:
        read_bytes = min(max(memory_bytes // 32, MIB), _READ_BYTES_MAX) // PAGE_BYTES * PAGE_BYTES
        return replace(self._checkpoint.settings, read_window_bytes=read_bytes, windows_in_flight=4)

    def _read_buffer_bytes(self, settings: Settings) -> int:
        return max(settings.read_window_bytes, self._checkpoint.index.chunk_bytes) + 2 * PAGE_BYTES

    def _open(self, number: int) -> OutputFile:
        return self._destination.open(self.files[number].name)

    def _window_plans(self, windows: Sequence[ExportWindow], settings: Settings) -> Iterator[WindowPlan]:
        for window in windows:
            plan, start, stop = self._plans[window.file], window.start, window.stop
            fills = tuple(plan.fills(start, stop))
            wanted = [WantedBoxes(fill.tensor.fqn, (fill.box,)) for fill in fills]
            reads = self._checkpoint.reads_for(wanted, settings.read_window_bytes)
            yield WindowPlan(window, tuple(plan.literals(start, stop)), fills, reads, tuple(plan.sums(start, stop)))


WorkerPool = Callable[[Sequence[ExportShare], Told], None]
"""Has every share carried out, each in a process of its own."""


def carry_out_export(
    export: Export,
    destination: Destination,
    request: ExportRequest,
    clock: Clock,
    crew: WorkerPool | None = None,
    observer: Observer | None = None,
) -> ExportReport:
    """Make the files, or go on where an earlier call was stopped, and have them appear.

    Args:
        export: What is made.
        destination: Where.
        request: With how much.
        clock: For how long it took.
        crew: Who carries out shares in processes of their own; None: this process does, alone.
        observer: Told of progress.
    Raises:
        ConflictError: Something stands at the destination, another process is exporting to it, or a file of the source
            was written again meanwhile; nothing appeared.
        UnavailableError: There is no room, or storage failed; what was done is kept.
    """
    began = clock.monotonic_seconds()
    window_bytes = export.window_bytes(request)
    with destination.claimed():
        note = json.dumps({"fingerprint": export.fingerprint}).encode()
        if destination.exists:
            published = destination.published()
            if destination.is_moved:
                destination.publish()  # What an earlier process had no time for.
            if published == note:
                return _report(export, destination, clock.monotonic_seconds() - began, export.bytes, 0)
            raise ConflictError(f"{destination.url}: something is there; it was not touched. Export elsewhere")
        begun_anew = _begin(destination, {file.name: file.bytes for file in export.files}, note)
        done, free = _journalled(destination)
        progress = _Progress(export.bytes, sum(each.window.bytes for each in done), observer)
        resumed_bytes = progress.done_bytes
        shares = [
            ExportShare(
                number=number,
                count=request.workers,
                window_bytes=window_bytes,
                memory_bytes=request.memory_bytes // request.workers,
                done=_ranges(done),
                journal=f"{_JOURNAL}{free + number}",
                fingerprint=export.fingerprint,
            )
            for number in range(request.workers)
        ]
        for share in shares:
            destination.journal(share.journal).close()
        if crew is None:
            for share in shares:
                export.execute(share, progress.told)
        else:
            crew(shares, progress.told)
        export.finish(_journalled(destination)[0])
        export.require_unchanged()
        destination.publish()
    seconds = clock.monotonic_seconds() - began
    return _report(export, destination, seconds, resumed_bytes, progress.read_bytes, begun_anew=begun_anew)


def _begin(destination: Destination, sizes: dict[str, int], note: bytes) -> bool:
    """Have every file there, its journals true of it; return whether unfinished work was thrown away for that."""
    known = destination.noted()
    if known == note and destination.is_begun(sizes):
        return False
    if known is not None:
        why = "has lost files" if known == note else "was of another source or other options"
        logger.warning("%s: unfinished work %s; it is thrown away", destination.work_url, why)
    destination.clear()
    destination.begin(sizes)
    destination.note(note)
    return known is not None


class _Progress:
    """How far all workers together are."""

    def __init__(self, total_bytes: int, done_bytes: int, observer: Observer | None) -> None:
        self.done_bytes, self.read_bytes = done_bytes, 0
        self._total_bytes, self._observer = total_bytes, observer
        self._lock = threading.Lock()
        self.told(0, 0)

    def told(self, written_bytes: int, read_bytes: int) -> None:
        with self._lock:
            self.done_bytes += written_bytes
            self.read_bytes += read_bytes
            if self._observer is not None:
                self._observer.on_event(Progress(self.done_bytes, self._total_bytes))


def _report(
    export: Export,
    destination: Destination,
    seconds: float,
    resumed_bytes: int,
    read_bytes: int,
    *,
    begun_anew: bool = False,
) -> ExportReport:
    return ExportReport(
        url=destination.url,
        format=export.format,
        files={file.name: file.bytes for file in export.files},
        resumed_bytes=resumed_bytes,
        read_bytes=read_bytes,
        seconds=seconds,
        begun_anew=begun_anew,
    )


def _journalled(destination: Destination) -> tuple[list[DoneWindow], int]:
    """Return what is durable, and a number that no journal has yet, nor any above it."""
    done: list[DoneWindow] = []
    number = 0
    for name, data in destination.journals().items():
        try:
            number = max(number, int(name.removeprefix(_JOURNAL)) + 1)
            done += _decode(data)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{destination.work_url}/{name}: not a journal of an export ({error}). Remove "
                f"{destination.work_url}, then run the command again: it begins anew"
            ) from error
    return done, number


def _ranges(done: Sequence[DoneWindow]) -> tuple[tuple[int, int, int], ...]:
    return tuple((each.window.file, each.window.start, each.window.stop) for each in done)


def _encode(done: Sequence[DoneWindow]) -> bytes:
    return b"".join(json.dumps(asdict(each)).encode() + b"\n" for each in done)


def _decode(data: bytes) -> Iterator[DoneWindow]:
    """Yield what a journal tells; its last line may have been cut short by a crash, and then tells nothing."""
    for line in data.split(b"\n")[:-1]:
        document = json.loads(line)
        sums = [(number, start, stop, crc) for number, start, stop, crc in document["sums"]]
        yield DoneWindow(ExportWindow(**document["window"]), tuple(sums))
