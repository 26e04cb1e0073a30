"""Export: writes a checkpoint as another system's files, window by window, within a memory budget.

The format lays the files out. A plan cuts them into windows. Workers, one or several processes, fill the windows; their
number changes neither files nor windows. Journals beside the files record durable windows, so a later process continues
after an interruption.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from holdfast.base.clock import Clock
from holdfast.base.ports.foreign import Writer
from holdfast.base.ports.observer import ByteProgress, Observer
from holdfast.base.types.export import ExportOptions, ExportWindow
from holdfast.errors import ConflictError, CorruptError
from holdfast.offline.export.crc32 import joined_crc32
from holdfast.offline.export.destination import Destination, OutputFile
from holdfast.offline.export.planned import (
    CAST_BYTES,
    ExportReport,
    ExportRequest,
    ExportShare,
    OnWindow,
    PlannedExport,
    WorkerPool,
)
from holdfast.offline.export.window_writer import READS_IN_FLIGHT, WINDOWS, DoneWindow, WindowWriter
from holdfast.offline.export.windows import share_of, windows_of
from holdfast.settings import MIB, PAGE_BYTES
from holdfast.stored.checkpoint.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_WINDOW_BYTES_MIN = 1 * MIB

_JOURNAL = "journal-"
"""Prefix of a journal's name; its number follows."""


class Export(PlannedExport):
    """The export of one checkpoint to one path of a file system."""

    def __init__(
        self, checkpoint: Checkpoint, destination: Destination, writer: Writer, options: ExportOptions, clock: Clock
    ) -> None:
        """Lay the files out; reads the index and writes nothing.

        Raises:
            InvalidError: The format cannot hold the checkpoint's content.
        """
        super().__init__(checkpoint, writer, options, clock)
        self.destination = destination
        """Where the files go."""

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
        started, destination = self._clock.monotonic_seconds(), self.destination
        window_bytes = self._window_bytes(request)
        read_bytes = 0
        with self._checkpoint.blaming_overwrite(), destination.claimed():
            note = json.dumps({"fingerprint": self.fingerprint}).encode()
            if destination.exists:
                published = destination.published()
                if destination.is_moved:
                    # An earlier process was interrupted between the move and the removal of notes.
                    destination.publish()
                if published == note:
                    return self._report(destination.url, started, self._bytes, 0)
                raise ConflictError(f"{destination.url}: exists already; it was not touched. Export elsewhere")
            begun_anew = self._begin(note)
            done, free_number = self._read_journals()
            resumed_bytes = sum(durable.window.bytes for durable in done)
            progress = ByteProgress(self._bytes, observer)
            progress.add(resumed_bytes)

            def on_window(written: int, read: int) -> None:
                nonlocal read_bytes
                read_bytes += read
                progress.add(written)

            journals = [f"{_JOURNAL}{free_number + number}" for number in range(request.workers)]
            shares = self._shares(request, window_bytes, _ranges(done), journals)
            for share in shares:
                # Create every journal before a worker starts. A later call numbers its journals above these, so it
                # shares none with a worker that outlived this process.
                destination.journal(share.journal).close()
            if pool is not None:
                pool(shares, on_window)
            else:
                for share in shares:
                    self.execute(share, on_window)
            self._write_checksums(self._read_journals()[0])
            self._checkpoint.require_unchanged()
            destination.publish()
        return self._report(destination.url, started, resumed_bytes, read_bytes, begun_anew=begun_anew)

    def execute(self, share: ExportShare, on_window: OnWindow) -> None:
        """Write a share's windows; return once all are durable and in the journal.

        Raises:
            CheckpointError: A read or write failed; the journal stays valid.
        """
        self._require_same(share)
        read_window_bytes = self._read_window_bytes(share.memory_bytes)
        windows = share_of(windows_of(self.files, share.window_bytes, share.done), share.number, share.count)
        source = self._source(read_window_bytes)
        if not windows:
            return
        journal = self.destination.journal(share.journal)
        try:
            longest = max(window.bytes for window in windows)
            writer = WindowWriter(
                self._open, lambda done: journal.append(_encode(done)), on_window, self._clock, longest
            )
            writer.execute(self._window_plans(windows, read_window_bytes), source)
        finally:
            journal.close()
        self._checkpoint.require_unchanged()

    def _write_checksums(self, done: Sequence[DoneWindow]) -> None:
        """Write the checksums of the files, which need every window's part."""
        left = windows_of(self.files, MIB, _ranges(done))
        assert not left, f"{len(left)} windows were left out, the first {left[0]}"
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for done_window in done:
            for number, start, stop, crc in done_window.sums:
                parts.setdefault((done_window.window.file, number), []).append((start, stop, crc))
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

    def _window_bytes(self, request: ExportRequest) -> int:
        """Return the bytes of a window, at most, that keep each worker within its part of the memory budget.

        A chunk on a window's edge is read twice, so large windows read less. Small windows overlap reads and writes.
        """
        worker_bytes = self._worker_bytes(request)
        reads = READS_IN_FLIGHT * self._read_bytes_max(self._read_window_bytes(worker_bytes))
        room = (worker_bytes - reads - CAST_BYTES) // WINDOWS
        wanted = max(self._bytes // (8 * request.workers), 16 * MIB)
        return min(max(min(room, wanted), _WINDOW_BYTES_MIN), request.window_bytes_max) // PAGE_BYTES * PAGE_BYTES

    def _open(self, number: int) -> OutputFile:
        return self.destination.open(self.files[number].name)

    def _begin(self, note: bytes) -> bool:
        """Create the files, unless work with this note can be continued; return whether other work was discarded."""
        destination, sizes = self.destination, {file.name: file.bytes for file in self.files}
        known = destination.noted()
        if known == note and destination.is_begun(sizes):
            return False
        if known is not None:
            why = "has lost files" if known == note else "has another source or other options"
            logger.warning("%s: the unfinished work %s; it is discarded", destination.work_url, why)
        destination.clear()
        destination.begin(sizes)
        # The note comes last: without it, an interrupted begin is repeated.
        destination.note(note)
        return known is not None

    def _read_journals(self) -> tuple[list[DoneWindow], int]:
        """Return the durable windows, and a number above that of every journal."""
        done: list[DoneWindow] = []
        number = 0
        for name, data in self.destination.journals().items():
            try:
                number = max(number, int(name.removeprefix(_JOURNAL)) + 1)
                done += _decode(data)
            except (ValueError, KeyError, TypeError) as error:
                work_url = self.destination.work_url
                raise CorruptError(
                    f"{work_url}/{name}: not a journal of an export ({error}). Remove {work_url}, then run the command "
                    "again: it starts from nothing"
                ) from error
        return done, number


def _ranges(done: Sequence[DoneWindow]) -> tuple[tuple[int, int, int], ...]:
    return tuple((durable.window.file, durable.window.start, durable.window.stop) for durable in done)


def _encode(done: Sequence[DoneWindow]) -> bytes:
    return b"".join(json.dumps(asdict(durable)).encode() + b"\n" for durable in done)


def _decode(data: bytes) -> Iterator[DoneWindow]:
    """Yield the windows in a journal. A crash may have cut its last line short; text without a line end is ignored."""
    for line in data.split(b"\n")[:-1]:
        document = json.loads(line)
        sums = [(number, start, stop, crc) for number, start, stop, crc in document["sums"]]
        yield DoneWindow(ExportWindow(**document["window"]), tuple(sums))
