"""The trace of one operation on one rank: its phases, its events, and the report stored beside the checkpoint."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace

from holdfast.base.clock import Clock
from holdfast.base.ports.comm import Comm
from holdfast.base.ports.store import Store
from holdfast.base.ports.temporary import RetryCounts
from holdfast.base.types.coding import KindDecision
from holdfast.base.types.events import (
    Began,
    Decided,
    Ended,
    Entered,
    Fact,
    Failed,
    Operation,
    Phase,
    Progress,
    RankReport,
    Verb,
)
from holdfast.base.types.reports import LoadReport, SaveReport, StepDrainReport
from holdfast.core.engine.background import is_done_soon
from holdfast.training.telemetry.dispatcher import EventDispatcher
from holdfast.training.telemetry.node_reports import NodeReports

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.1
"""Shortest time between two progress events of one operation."""

_CODINGS_MAX = 16
"""Kinds of tensors in a stored report, the largest: a state has about five, and reports of a node share a file."""

_NO_FACTS = ("step", "url", "attempt", "phases", "bytes", "codings")
"""Fields of an outcome that a report holds elsewhere, or not at all."""


class OperationTrace:
    """The phases and events of one operation on one rank. Every method may be called on any thread."""

    def __init__(
        self,
        verb: Verb,
        step: int | None,
        url: str,
        comm: Comm,
        clock: Clock,
        dispatcher: EventDispatcher,
        store: Store | None = None,
    ) -> None:
        """Start the clock; no event is dispatched yet.

        Args:
            verb, step, url: The operation, as far as it is known.
            comm: The ranks.
            clock: Time.
            dispatcher: Passes events to observers.
            store: Where the checkpoint is stored; None: retries are not counted.
        """
        self._clock, self._dispatcher, self._store = clock, dispatcher, store
        self._retries_before = self._retries_so_far()
        self._read_before = Counter({} if store is None else store.read_bytes)
        self.operation = Operation(verb, step, url, comm.rank, comm.world_size)
        """The save, load or drain."""
        self._start, self._unix_seconds = clock.monotonic_seconds(), clock.unix_seconds()
        self._phases: list[Phase] = []
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0
        self._progress_seconds = 0.0
        self._has_begun = self._is_over = False

    @property
    def seconds(self) -> float:
        """Seconds since the operation started."""
        return self._clock.monotonic_seconds() - self._start

    @property
    def retry_counts(self) -> RetryCounts:
        """What retries have cost this process since the operation started."""
        return self._retries_so_far().since(self._retries_before)

    def _retries_so_far(self) -> RetryCounts:
        return RetryCounts() if self._store is None else self._store.retry_counts

    def sources(self, by_url: Mapping[str, int]) -> Mapping[str, int]:
        """Return the bytes that the operation has read, with the places within a near tier of several.

        Args:
            by_url: The bytes by URL of the root. Packs of other steps count as of the root, wherever they were read.
        """
        if self._store is None:
            return by_url
        found, rest = Counter(self._store.read_bytes) - self._read_before, Counter(by_url)
        left = found.total()
        for url in sorted(by_url, key=self._store.url.__eq__):  # The root last.
            taken = min(rest[url], left)
            rest[url], left = rest[url] - taken, left - taken
        return {**found, **+rest}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended, by start time."""
        return tuple(sorted(self._phases, key=lambda phase: (phase.start_seconds, phase.stop_seconds)))

    def begin(self, step: int | None, url: str) -> None:
        """Dispatch the begin of the operation, now that its checkpoint is known."""
        self.operation = replace(self.operation, step=step, url=url)
        self._has_begun = True
        self._dispatcher.dispatch(Began(self.operation, self._unix_seconds))

    def begin_again(self, error: BaseException) -> None:
        """Dispatch the failure of a load at one step; the load falls back to another step and calls `begin` again."""
        self._dispatch_failure(error, ())
        self._has_begun = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a block as a phase, also if it raises."""
        start = self.begin_phase(name)
        try:
            yield
        finally:
            self.add_phase(name, start, self.seconds)

    def begin_phase(self, name: str) -> float:
        """Dispatch the begin of a phase; return its start, in seconds since the operation started."""
        if self._has_begun:
            self._dispatcher.dispatch(Entered(self.operation, name))
        return self.seconds

    def decide(self, decisions: Mapping[str, KindDecision], predicted_seconds: float | None) -> None:
        """Dispatch which kinds of tensors a save codes, and how long it is expected to write."""
        self._dispatcher.dispatch(Decided(self.operation, decisions, predicted_seconds, self._clock.unix_seconds()))

    def add_phase(self, name: str, start_seconds: float, stop_seconds: float) -> None:
        """Record a phase that has ended; both times are seconds since the operation started."""
        start, stop = round(start_seconds, 6), round(stop_seconds, 6)
        self._phases.append(Phase(name, start, round(max(stop - start, 0.0), 6)))

    def progress_callback(self, total_bytes: int) -> Callable[[int], None] | None:
        """Return a function that takes counts of bytes moved, on any thread; None without observers."""
        if not self._dispatcher.has_observers:
            return None
        self._done_bytes, self._total_bytes = 0, total_bytes
        return self._add_bytes

    def _add_bytes(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            now = self.seconds
            if now - self._progress_seconds < _PROGRESS_SECONDS and self._done_bytes < self._total_bytes:
                return
            self._progress_seconds = now
            event = Progress(self._done_bytes, self._total_bytes, self.operation)
        # Outside the lock: dispatching must not serialise the threads that move bytes.
        self._dispatcher.dispatch(event)

    def end(
        self,
        outcome: SaveReport | LoadReport | StepDrainReport,
        id: str,
        store: Store | None,
        folder: str,
        node: NodeReports,
    ) -> None:
        """Dispatch the report, and store it beside the checkpoint if possible. Never raises.

        Storage that does not answer delays the return by a few seconds, and the report may appear later.

        Args:
            outcome: The report for the caller.
            id: 16 hex digits that all ranks share.
            store: The store of the checkpoint; None stores no report.
            folder: The folder of the checkpoint in that store.
            node: Stores the report.
        """
        self._is_over = True
        try:
            report = self._report(outcome, id)
            self._dispatcher.dispatch(Ended(report))
            if store is not None and not is_done_soon(lambda: node.put(store, folder, report), self._clock):
                raise TimeoutError("storage does not answer")
        except Exception as error:  # noqa: BLE001 - no report is worth a save or a load
            # A warning on rank 0 only: if one rank cannot write, most likely none can.
            level = logging.INFO if self.operation.rank else logging.WARNING
            text = (
                "%s: the report could not be stored beside the checkpoint: %s: %s. "
                "To store none, set settings.reports=False"
            )
            logger.log(level, text, self.operation.name, type(error).__name__, error)

    def _report(self, outcome: SaveReport | LoadReport | StepDrainReport, id: str) -> RankReport:
        facts: dict[str, Fact] = {}
        for field in fields(outcome):
            value = getattr(outcome, field.name)
            if field.name in _NO_FACTS:
                continue
            if isinstance(value, int | float | str | bool):
                facts[field.name] = value
            elif isinstance(value, tuple):
                facts[field.name] = len(value)
        return RankReport(
            operation=self.operation,
            id=id,
            host=platform.node(),
            pid=os.getpid(),
            began_unix_seconds=self._unix_seconds,
            seconds=self.seconds,
            phases=self.phases,
            bytes=outcome.bytes,
            facts=facts,
            codings=outcome.codings[:_CODINGS_MAX] if isinstance(outcome, SaveReport) else (),
        )

    def fail(self, error: BaseException) -> None:
        """Dispatch the failure of the operation, unless it has ended."""
        if not self._is_over:
            self._is_over = True
            self._dispatch_failure(error, self.phases)

    def _dispatch_failure(self, error: BaseException, phases: tuple[Phase, ...]) -> None:
        kind, message = type(error).__name__, str(error)
        self._dispatcher.dispatch(
            Failed(self.operation, kind, message, self._unix_seconds, self.seconds, phases, self._has_begun)
        )

    def fail_with(self, committed: Future[SaveReport]) -> None:
        """Dispatch the failure of a save if its future holds an error; a done-callback of that future."""
        error = committed.exception()
        if error is not None:
            self.fail(error)
