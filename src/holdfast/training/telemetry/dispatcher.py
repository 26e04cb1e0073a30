"""Passes events to the observers of a run, each on a thread of its own, so that none of them can delay a save."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Sequence

from holdfast.base.clock import Clock
from holdfast.base.interrupts import start_thread
from holdfast.base.ports.observer import Observer
from holdfast.base.types.events import Event
from holdfast.errors import InvalidError

logger = logging.getLogger(__name__)

QUEUED_MAX = 4096
"""About how many events wait for one observer. Further events are dropped for that observer, and counted."""

DRAIN_TIMEOUT_SECONDS = 5.0
"""How long the end of a run waits for all observers together to handle the events still queued."""


class EventDispatcher:
    """The observers of a run. `dispatch` never waits and never raises."""

    def __init__(
        self, observers: Sequence[Observer], clock: Clock, *, drain_timeout_seconds: float = DRAIN_TIMEOUT_SECONDS
    ) -> None:
        """Check the observers; each gets its thread with its first event.

        Args:
            observers: Objects with a method `on_event(event)`.
            clock: Measures the wait in `close()`.
            drain_timeout_seconds: How long `close()` waits at most.
        Raises:
            InvalidError: An object has no such method.
        """
        for observer in observers:
            if not callable(getattr(observer, "on_event", None)):
                raise InvalidError(
                    f"observers: {type(observer).__name__} has no method on_event(event); expected observers from "
                    "holdfast.observers, or objects with that method"
                )
        self._queues = tuple(_ObserverQueue(observer) for observer in observers)
        self._clock, self._drain_timeout_seconds = clock, drain_timeout_seconds
        if self._queues:
            # Exit hooks run in reverse order: saves under way finish first. Daemon threads still run at that point.
            atexit.register(self.close)

    @property
    def has_observers(self) -> bool:
        """Whether any observer is left. Without one, callers can skip building events."""
        return bool(self._queues)

    def dispatch(self, event: Event) -> None:
        """Queue an event for every observer."""
        for observer_queue in self._queues:
            observer_queue.put(event)

    def close(self) -> None:
        """Wait until the observers have handled the queued events, within the time limit; dispatch nothing more."""
        if not self._queues:
            return
        atexit.unregister(self.close)
        deadline = self._clock.monotonic_seconds() + self._drain_timeout_seconds
        # All ends first: the observers then drain in parallel, within one time limit.
        for observer_queue in self._queues:
            observer_queue.end()
        for observer_queue in self._queues:
            observer_queue.join(max(deadline - self._clock.monotonic_seconds(), 0.0))
        self._queues = ()


class _ObserverQueue:
    """One observer, its queue of events in order, and the thread that calls it."""

    def __init__(self, observer: Observer) -> None:
        self._observer, self._name = observer, f"observer {type(observer).__name__}"
        # SimpleQueue: a signal handler may put an event while the interrupted code is inside another put.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._dropped_count = 0
        self._has_failed = False

    def put(self, event: Event) -> None:
        if self._events.qsize() >= QUEUED_MAX:
            self._dropped_count += 1
            return
        self._events.put(event)
        # Never block here: if another thread holds the lock, it starts the thread, and that one handles this event too.
        if self._thread is None and self._lock.acquire(blocking=False):
            try:
                self._start()
            finally:
                self._lock.release()

    def end(self) -> None:
        self._events.put(None)

    def join(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        dropped = self._dropped_count
        if self._thread.is_alive():
            # The queue also holds the end marker.
            dropped += max(self._events.qsize() - 1, 0)
        if dropped:
            logger.warning("%s was too slow: %d events were dropped", self._name, dropped)

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name="holdfast-observer", daemon=True)
        try:
            start_thread(thread)
        except RuntimeError as error:
            # The thread limit is reached, or the interpreter is exiting. The next event tries again.
            logger.debug("%s: no thread could be started: %s", self._name, error)
        else:
            self._thread = thread

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._observer.on_event(event)
            except BaseException as error:  # noqa: BLE001 - an observer must not end its own thread
                if not self._has_failed:
                    logger.warning(
                        "%s failed and still gets later events; this warning is given once: %s: %s",
                        self._name,
                        type(error).__name__,
                        error,
                    )
                self._has_failed = True
