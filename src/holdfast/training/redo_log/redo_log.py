"""The redo log of a manager: everything between two boundaries of training becomes a record, sealed in the background.

Read this file first. A boundary is a call of `maybe_save` or `save`. States of the log on one rank:

    waiting     No base yet, since the start or a load. The next boundary saves a base, whatever the policy says.
    logging     Each boundary ends a record. Records follow each other without a gap from the last base on.
    interrupted A record is lost: `why` has the reason. Steps are lost at a failure until the next base.

    waiting     -> logging       a base is planned (`planned`): the hooks of the optimizers record from here on
    logging     -> interrupted   the capture has a gap, a seal failed, or a step does not rise; a base is requested
    interrupted -> logging       the next base is planned
    any         -> waiting       a load (`forget`)

Ranks do not tell each other of an interruption: the records of a step count only if every rank has sealed its own, so
the others' records up to the next base count no more. Each record names the boundary at which it begins, so a gap is
seen by every reader.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from holdfast.base.geometry.region import Region
from holdfast.base.ports.framework import Collected, Selection
from holdfast.base.ports.gradients import GradientCapture
from holdfast.base.types.events import LogInterrupted, LogSealed
from holdfast.base.types.reports import SaveReport
from holdfast.core.plan.plan_cache import SavePlan
from holdfast.errors import shown_bytes, text_of
from holdfast.settings import Differential
from holdfast.training.coordination.save_schedule import Schedule, taking_requests
from holdfast.training.redo_log.log_memory import LogMemory
from holdfast.training.redo_log.log_writer import LogWriter
from holdfast.training.redo_log.segments import QueuedRecord
from holdfast.training.runs.run_parts import RunParts
from holdfast.training.saving.target import SaveTarget
from holdfast.training.telemetry.dispatcher import EventDispatcher

logger = logging.getLogger(__name__)

_BASES_OF_LOG, _SHARE_OF_FREE = 16, 4
"""The log has at most as many bytes as sixteen bases, and a quarter of the free space."""

_LOG_BYTES_MIN = 1 << 30
"""A log smaller than this is not limited by the bytes of bases: a base of a small state costs more than its bytes."""

_REQUESTS_MAX = 2
"""Bases that interruptions request between two bases of the policy."""


def redo_log_of(
    parts: RunParts, schedule: Schedule | None, options: Differential | None, dispatcher: EventDispatcher
) -> RedoLog | None:
    """Return the log of a run; None without one.

    Raises:
        InvalidError: The policy takes no requests.
    """
    if options is None:
        return None
    request_base = taking_requests(schedule, f"{parts.store.url}: differential").request
    return RedoLog(parts, options, request_base, dispatcher)


class _Bases:
    """The bases of a log so far. The handle of a save, which may be kept for long, keeps this object and no memory."""

    def __init__(self, request: Callable[[], None]) -> None:
        self.committed: int | None = None
        """The newest committed base."""
        self.failed = 0
        """Bases that failed since then."""
        self._request = request

    def note(self, step: int, committed: Future[SaveReport]) -> None:
        """Take note of the end of a base; on any thread."""
        if committed.exception() is not None:
            self.failed += 1
            if self.failed <= _REQUESTS_MAX:
                self._request()
            return
        self.failed = 0
        if self.committed is None or step > self.committed:
            self.committed = step


class RedoLog:
    """The log of one manager on one rank. Called on the training thread."""

    def __init__(
        self, parts: RunParts, options: Differential, request_base: Callable[[], None], dispatcher: EventDispatcher
    ) -> None:
        """Wait for the first base.

        Args:
            parts: Resources of the run.
            options: How records are kept.
            request_base: Requests a save soon on all ranks.
            dispatcher: Receives the events.
        """
        self._store, self._dispatcher = parts.store, dispatcher
        self._job, self._pins, self._options, self._request_base = parts.job, parts.pins, options, request_base
        self._writer = LogWriter(parts.job, parts.store, parts.writer, options, self._note_sealed)
        self._memory = LogMemory(parts.job.clock)
        self._reported_wait_seconds = 0.0
        self._capture: GradientCapture | None = None
        self._id = ""
        self._at: int | None = None
        """The boundary at which the next record begins; None if the records have a gap."""
        self._began = 0
        """The base from which the records have no gap."""
        self._recoverable_before: int | None = None
        """The step to which a restart would come back until that base is committed."""
        self._has_tried = False
        self._requests = 0
        self._state: Mapping[str, object] | None = None
        """The state of a base that is not planned yet. The target of a save must not keep a state."""
        self._selection: Selection | None = None
        """The names that the bases of this log save; None before the first."""
        self._base_bytes = 0
        """Bytes of the log of this rank at the last base."""
        self._interval_bytes: float = math.inf
        """Bytes of the log of this rank after which a base is requested."""
        self._is_full = self._has_announced = False
        self.bases = _Bases(request_base)
        """The bases of this log."""
        self.why = ""
        """Why steps are lost at a failure now; empty while all are recorded."""

    @property
    def is_base_due(self) -> bool:
        """Whether the next boundary saves a base: the same on every rank."""
        return not self._has_tried

    @property
    def recoverable(self) -> int | None:
        """The last step to which a restart would come back, as far as this rank knows; None before the first base."""
        sealed, committed = self._writer.sealed_step, self.bases.committed
        if committed is None or committed < self._began:
            return self._recoverable_before
        return committed if sealed is None else max(committed, sealed)

    def boundary(self, step: int, state: Mapping[str, object]) -> None:
        """End the record of a step. Nothing but Ctrl-C raises."""
        if self._capture is None or self._at is None:
            return
        try:
            self._end_record(step, self._at, state)
        except BaseException as error:
            # Calls of this record may be lost: what follows must not be taken for all of it.
            self._interrupt(step, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise

    def _end_record(self, step: int, began: int, state: Mapping[str, object]) -> None:
        assert self._capture is not None, "the log records"
        captured = self._capture.boundary(step, state)
        is_short = self._memory.end_record()
        failure = self._capture.interrupted or self._writer.failure
        if captured is not None and step == began:
            if captured.record.calls or captured.record.images:
                failure = failure or f"training went on after the boundary of step {step}, without a new step"
        elif step < began:
            failure = failure or f"step {step} follows step {began}; expected rising steps"
            # Records of this log may follow a base of the lower number, and would not follow the new one.
            self._id = ""
        if captured is None or failure or step == began:
            if captured is not None:
                captured.release()
            if captured is None or failure:
                self._interrupt(step, failure or "the steps of this record have a gap")
            return
        self._writer.put(QueuedRecord(captured, began, self._id), at_once=is_short)
        self._at = step
        if self._writer.sealed_bytes - self._base_bytes > self._interval_bytes and not self._is_full:
            self._is_full = True  # Until the next base.
            self._request_base()
        self._announce_sizes(step)

    def as_base(
        self,
        step: int,
        target: SaveTarget,
        state: Mapping[str, object],
        selection: Selection,
        collect: Callable[[], Collected],
    ) -> tuple[SaveTarget, Callable[[], Collected]]:
        """Return the target and the function of a save, as those of a base of this log.

        The function refuses a state that cannot be recorded, on every rank.

        Args:
            step, target, state, selection: What is saved, and where.
            collect: Takes the state apart.
        """
        self._has_tried = True
        self._writer.hold()
        if self._selection not in (None, selection):
            if self._at is not None:
                self._interrupt(step, "another only=, skip= or grads= was given; the step is no base of the log")
            return target, collect
        self._state, self._selection = state, selection
        if self.bases.committed is None and self.bases.failed:
            # Some rank may have begun the log of the failed base, and another rank not. This base begins a log.
            self._id, self._at = "", None

        def prepared() -> Collected:
            if self._capture is None:
                framework, vouched = self._job.framework, self._options.optimizers
                try:
                    self._capture = framework.capture(state, selection, vouched, self._memory)
                except Exception as error:
                    if not self.why:
                        raise  # The first base. Later ones are saved in any case.
                    self._interrupt(step, text_of(error))
            return collect()

        return replace(target, log=self._id, planned=partial(self._planned, step)), prepared

    def note_begun(self, step: int, committed: Future[SaveReport]) -> None:
        """Take note of a save whose call ends now."""
        self._writer.let_go()
        # No bound method of this object: the handle of a save may be kept for long.
        committed.add_done_callback(partial(self.bases.note, step))

    def seal(self, step: int, seconds: float) -> bool:
        """Seal all records in time; return whether a restart would go on at this step, as far as this rank knows."""
        return self._writer.drain(seconds) and self.recoverable == step

    def forget(self) -> None:
        """Begin again after a load: the state is another, and the records after it are of another log."""
        if self._capture is not None:
            self._capture.close()
        self._capture, self._id, self._at, self._has_tried = None, "", None, False
        self._selection = None
        self.bases = _Bases(self._request_base)
        self._requests, self.why, self._pins.log = 0, "", ""
        self._began, self._recoverable_before = 0, None

    def close(self) -> None:
        """Seal all records, and remove the hooks. A closed log keeps no state alive."""
        if self._capture is not None:
            self._capture.close()
        self._capture = self._state = None
        self._writer.close()

    def _planned(self, step: int, attempt: str, plan: SavePlan) -> None:
        """Begin to record at a base that the ranks agreed on: the first base gives the log its id."""
        if self._capture is None:
            self._state = None
            return  # The steps can be recorded no more.
        self._is_full = False
        if self._at == step:
            self._base_bytes, self._requests, self._state = self._writer.sealed_bytes, 0, None
            return  # The records go on.
        self._interval_bytes = self._bytes_max(plan.bytes) / 2 / self._job.comm.world_size
        self._id = self._pins.log = self._id or attempt
        regions: dict[str, list[Region]] = {}
        for pack, _ in plan.packs:
            for item in pack.items:
                regions.setdefault(item.tensor.fqn, []).append(item.region)
        self._capture.begin(step, regions, self._state)
        self._memory.end_record()
        self._memory.record_bytes_max = plan.bytes
        self._state = None
        self._recoverable_before, self._began = self.recoverable, step
        self._writer.begin(self._id, plan.bytes * self._job.comm.world_size)
        self._base_bytes = self._writer.sealed_bytes
        self._at, self.why = step, ""

    def _bytes_max(self, base_bytes: int) -> int:
        """Return the bytes that the log of all ranks may take."""
        if self._options.log_bytes_max is not None:
            return self._options.log_bytes_max
        limit = max(_BASES_OF_LOG * base_bytes * self._job.comm.world_size, _LOG_BYTES_MIN)
        free = self._store.free_bytes()
        return limit if free is None else min(limit, free // _SHARE_OF_FREE)

    def _announce_sizes(self, step: int) -> None:
        """Log once how large records are: the sizes decide how often a base is saved, whatever the policy says."""
        count, records = self._writer.sealed_bytes, self._writer.sealed_records
        if self._has_announced or not records:
            return
        self._has_announced = True
        if self._job.comm.rank == 0:
            logger.info(
                "step %d: the redo log takes about %s a step and rank, and up to %s a rank between two bases: a base "
                "comes at least every %d steps. Differential(log_bytes_max=…) sets the bytes",
                step,
                shown_bytes(count // records),
                shown_bytes(int(self._interval_bytes)),
                max(int(self._interval_bytes * records / count), 1),
            )

    def _note_sealed(self, step: int, records: int, count: int) -> None:
        """Dispatch that records are durable. On the thread that seals."""
        waited, self._reported_wait_seconds = self._reported_wait_seconds, self._memory.waited_seconds
        waited, rank = self._reported_wait_seconds - waited, self._job.comm.rank
        self._dispatcher.dispatch(LogSealed(step, self._store.url, rank, records, count, waited, self.recoverable))

    def _interrupt(self, step: int, why: str) -> None:
        has_space = self._writer.has_space
        logger.warning(
            "step %d: the redo log is interrupted: %s. Training goes on; a failure now costs the steps since the last "
            "base. %s",
            step,
            why,
            "A new base is requested" if has_space else "The next base of the policy ends this",
        )
        self.why, self._at = why, None
        if self._capture is not None:
            # The optimizers may have other groups or parameters: the next base hooks the state again.
            self._capture.close()
            self._capture = None
        now, rank = self._job.clock.unix_seconds(), self._job.comm.rank
        self._dispatcher.dispatch(LogInterrupted(step, self._store.url, rank, why, now))
        if self._requests < _REQUESTS_MAX and has_space:
            self._requests += 1
            self._request_base()
