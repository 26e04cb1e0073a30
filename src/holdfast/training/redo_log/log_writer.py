"""Seals records on a thread of its own: records that come while a seal is under way share the next segment."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.base.ports.store import Store
from holdfast.core.engine.background import BackgroundQueue, WriteProgress
from holdfast.core.engine.writing.write import PackWriter
from holdfast.errors import UnavailableError, shown_bytes
from holdfast.settings import Differential
from holdfast.training.coordination.job import Job
from holdfast.training.redo_log.segments import QueuedRecord, write_segment

_SEGMENT_RECORDS_MAX = 64
"""Most records of a segment: a seal that never ends would seal nothing."""

_HELD_SECONDS_MAX = 1.0
"""Longest wait of a seal for the call of a base: the copies of the base block training, and need the processors."""


class LogWriter:
    """Seals the records of one rank, for the life of a manager.

    The training thread puts records; the thread of the queue writes segments. States of the writer:

        sealing    Records are written.
        failed     A write failed: records are dropped until `begin`. `failure` has the reason.
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        writer: PackWriter,
        options: Differential,
        note_sealed: Callable[[int, int, int], None],
    ) -> None:
        """Start no thread yet.

        Args:
            job: The ranks.
            store: The root of the run.
            writer: Writes packs there.
            options: How many records are waited for before a seal, and whether gradients are compressed.
            note_sealed: Called on the thread of the queue after each seal: last step, records, bytes of the segment.
        """
        self._job, self._store, self._writer, self._flush_every = job, store, writer, options.flush_every
        self._coded_bytes_min = job.settings._tuning.coded_bytes_min if options.compression == "on" else math.inf
        self._note_sealed = note_sealed
        self._queue = BackgroundQueue("holdfast-log", WriteProgress(job.clock))
        self._pending: deque[QueuedRecord] = deque()
        self._held_until = -math.inf
        """Monotonic time at which a seal begins although the call of a base goes on."""
        self._log = ""
        self.base_space = 0
        """Free bytes that a seal leaves: for a base that the log requests, and for the next base of the policy, which
        may come within the grace of a collection."""
        self.has_space = True
        """Whether the last seal found that space. Read on the training thread, which must not ask storage."""
        self.failure = ""
        """Why records are dropped; empty if they are sealed. Set by the thread, read and reset by the training thread.
        """
        self.sealed_step: int | None = None
        """The last step that was sealed in this log."""
        self.sealed_bytes = self.sealed_records = 0
        """Bytes and records of all segments of this log."""

    def begin(self, log: str, base_bytes: int) -> None:
        """Begin a log, or go on with the same one after a failure.

        Args:
            log: Id of the log.
            base_bytes: Bytes of the tensors of a base, of all ranks.
        """
        if log != self._log:
            self._log, self.sealed_step, self.sealed_bytes, self.sealed_records = log, None, 0, 0
        self.failure, self.has_space, self.base_space = "", True, base_bytes * 9 // 4

    def put(self, record: QueuedRecord, *, at_once: bool = False) -> None:
        """Queue a record; seal it at once, or with `flush_every` others. On the training thread."""
        if self.failure:
            record.captured.release()
            return
        self._pending.append(record)
        if at_once or len(self._pending) >= self._flush_every:
            self._queue.submit(self._seal)

    def hold(self) -> None:
        """Begin no seal for a moment: a base is copied."""
        self._held_until = self._job.clock.monotonic_seconds() + _HELD_SECONDS_MAX

    def let_go(self) -> None:
        """Begin seals again."""
        self._held_until = -math.inf

    def drain(self, seconds: float | None = None) -> bool:
        """Seal all queued records; return whether everything is sealed.

        Args:
            seconds: How long to wait; None: until the end.
        """
        future = self._queue.submit(self._seal)
        try:
            future.result(seconds)
        except TimeoutError:
            return False
        return not self.failure

    def close(self) -> None:
        """Seal all queued records, and end the thread; a write that hangs is not awaited."""
        if self._pending:
            self._queue.submit(self._seal)
        self._queue.close()

    def _seal(self) -> None:
        """Write one segment of the records that wait. On the thread of the queue."""
        clock = self._job.clock
        while clock.monotonic_seconds() < self._held_until:
            clock.sleep(0.001)
        records: list[QueuedRecord] = []
        while self._pending and len(records) < _SEGMENT_RECORDS_MAX:
            if records and self._pending[0].log != records[0].log:
                break  # A load began another log.
            records.append(self._pending.popleft())
        if not records:
            return
        try:
            if self.failure:
                return
            count = self._write(records)
            if records[0].log == self._log:
                self.sealed_step = records[-1].captured.record.step
                self.sealed_bytes += count
                self.sealed_records += len(records)
                self._note_sealed(self.sealed_step, len(records), count)
        except Exception as error:  # noqa: BLE001 - the log is interrupted; training goes on
            self.failure = f"step {records[0].captured.record.step} could not be sealed: {error}"
        finally:
            for record in records:
                record.captured.release()

    def _write(self, records: Sequence[QueuedRecord]) -> int:
        job, progress = self._job, self._queue.progress
        with progress.writing("segment of the redo log", job.stall_seconds):
            self._require_space(records)
            return write_segment(
                self._store,
                self._writer,
                job.comm.rank,
                records,
                lambda _: progress.note_written(),
                self._coded_bytes_min,
            )

    def _require_space(self, records: Sequence[QueuedRecord]) -> None:
        """Raise if the next bases would not fit beside these records of all ranks: the log must cost no base."""
        own_bytes = sum([queued.captured.bytes for queued in records])
        needed, free = own_bytes * self._job.comm.world_size + self.base_space, self._store.free_bytes()
        self.has_space = free is None or free >= self.base_space
        if free is not None and free < needed:
            raise UnavailableError(
                f"{self._store.url} has {shown_bytes(free)} free; expected {shown_bytes(needed)}, so that the next "
                "checkpoints fit. Free space, or keep fewer checkpoints"
            )
