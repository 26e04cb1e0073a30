"""One save or load on one rank as it goes: its phases, who is told of them, and the report that is left beside it."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields

from holdfast.clock import Clock
from holdfast.ports.comm import Comm
from holdfast.ports.store import Store
from holdfast.repository.reports import put_report
from holdfast.telemetry.dispatcher import EventDispatcher
from holdfast.types.events import (
    Began,
    Ended,
    Entered,
    Event,
    Fact,
    Failed,
    Operation,
    Phase,
    Progress,
    RankReport,
    Verb,
)
from holdfast.types.reports import SaveReport

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.1
"""Progress is told no more often."""


class OperationTrace:
    """What one rank does in one save or load. Phases may be noted on any thread."""

    def __init__(
        self, verb: Verb, step: int | None, url: str, comm: Comm, clock: Clock, dispatcher: EventDispatcher
    ) -> None:
        """Begin; nobody is told yet."""
        self._clock, self._dispatcher = clock, dispatcher
        self.operation = Operation(verb, step, url, comm.rank, comm.world_size)
        """The save or load."""
        self._start, self._unix_seconds = clock.monotonic_seconds(), clock.unix_seconds()
        self._phases: list[Phase] = []
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0
        self._told_at = 0.0
        self._has_begun = self._is_over = False

    @property
    def seconds(self) -> float:
        """Seconds since the call."""
        return self._clock.monotonic_seconds() - self._start

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that are over, by when they began."""
        return tuple(sorted(self._phases, key=lambda phase: (phase.start_seconds, phase.stop_seconds)))

    def begin(self, step: int | None, url: str) -> None:
        """Tell that it has begun, and of which checkpoint it is."""
        own = self.operation
        self.operation = Operation(own.verb, step, url, own.rank, own.world_size)
        self._has_begun = True
        self._tell(Began(self.operation, self._unix_seconds))

    def begin_again(self, error: BaseException) -> None:
        """Tell that a load failed with the step it took, and goes on with another."""
        self._tell_failure(error, ())
        self._has_begun = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note how long the block takes."""
        start = self.enter(name)
        try:
            yield
        finally:
            self.note(name, start, self.seconds)

    def enter(self, name: str) -> float:
        """Tell that a phase has begun; return when, in seconds since the call."""
        if self._has_begun:
            self._tell(Entered(self.operation, name))
        return self.seconds

    def note(self, name: str, start_seconds: float, stop_seconds: float) -> None:
        """Note a phase that is over, by seconds since the call."""
        start, stop = round(start_seconds, 6), round(stop_seconds, 6)
        self._phases.append(Phase(name, start, round(max(stop - start, 0.0), 6)))

    def progress_callback(self, total_bytes: int) -> Callable[[int], None] | None:
        """Return what is to be told of bytes that are written or read, on any thread; None where nobody listens."""
        if not self._dispatcher.listens:
            return None
        self._done_bytes, self._total_bytes = 0, total_bytes
        return self._moved

    def _moved(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            now = self.seconds
            if now - self._told_at < _PROGRESS_SECONDS and self._done_bytes < self._total_bytes:
                return
            self._told_at = now
            event = Progress(self._done_bytes, self._total_bytes, self.operation)
        self._tell(event)

    def end(self, own: object, id: str, store: Store | None, folder: str) -> None:
        """Tell what came of it, and leave the report beside the checkpoint as well as that can be done; never raises.

        Args:
            own: Its `SaveReport` or `LoadReport`.
            id: 16 hex digits that all ranks share.
            store: Where the checkpoint lies; None: the report is not to be left.
            folder: Its folder there.
        """
        self._is_over = True
        try:
            report = self._report(own, id)
            self._tell(Ended(report))
            if store is not None:
                put_report(store, folder, report)
        except Exception as error:  # noqa: BLE001 - no report is worth a save or a load
            # One rank says it for all: where one cannot write, the others most likely cannot either.
            level = logging.INFO if self.operation.rank else logging.WARNING
            text = "%s: no report is left beside the checkpoint; settings.reports=False asks for none: %s: %s"
            logger.log(level, text, self.operation.name, type(error).__name__, error)

    def _report(self, own: object, id: str) -> RankReport:
        facts: dict[str, Fact] = {}
        for each in fields(own):  # type: ignore[arg-type]
            value = getattr(own, each.name)
            if isinstance(value, int | float | str | bool):
                facts[each.name] = value
            elif isinstance(value, tuple):
                facts[each.name] = len(value)
        for known in ("step", "url", "attempt", "phases"):
            facts.pop(known, None)
        count = facts.pop("bytes")
        assert isinstance(count, int), count
        return RankReport(
            operation=self.operation,
            id=id,
            host=platform.node(),
            pid=os.getpid(),
            began_unix_seconds=self._unix_seconds,
            seconds=self.seconds,
            phases=self.phases,
            bytes=count,
            facts=facts,
        )

    def fail(self, error: BaseException) -> None:
        """Tell that it has failed; the first time counts."""
        if self._is_over:
            return
        self._is_over = True
        self._tell_failure(error, self.phases)

    def _tell_failure(self, error: BaseException, phases: tuple[Phase, ...]) -> None:
        told = type(error).__name__, str(error), self._unix_seconds, self.seconds, phases
        self._tell(Failed(self.operation, *told, self._has_begun))

    def fail_with(self, committed: Future[SaveReport]) -> None:
        """Tell that a save has failed, where its future says so."""
        error = committed.exception()
        if error is not None:
            self.fail(error)

    def _tell(self, event: Event) -> None:
        self._dispatcher.tell(event)
