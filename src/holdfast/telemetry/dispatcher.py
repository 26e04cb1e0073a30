"""The observers of a run: told on threads of their own, so that none of them can hurt a save."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Sequence

from holdfast.clock import Clock
from holdfast.errors import InvalidError
from holdfast.ports.observer import Observer
from holdfast.types.events import Event

logger = logging.getLogger(__name__)

WAITING_MAX = 4096
"""Events that wait for one observer, about; what comes beyond them is lost to it."""

DRAIN_TIMEOUT_SECONDS = 5.0
"""How long the end of a run waits for observers to hear the last of it, all of them together."""


class EventDispatcher:
    """Who hears of a run's saves and loads. Telling never waits and never raises."""

    def __init__(
        self, observers: Sequence[Observer], clock: Clock, *, farewell_seconds: float = DRAIN_TIMEOUT_SECONDS
    ) -> None:
        """Begin.

        Args:
            observers: Who is told, each by a thread of its own.
            clock: For the wait at the end.
            farewell_seconds: How long that is at most.
        Raises:
            InvalidError: One of them cannot be told anything.
        """
        for each in observers:
            if not callable(getattr(each, "on_event", None)):
                raise InvalidError(
                    f"observers: {type(each).__name__} has no method on_event(event); expected those of "
                    "holdfast.observers, or objects that have one"
                )
        self._listeners = tuple(_Listener(each) for each in observers)
        self._clock, self._farewell_seconds = clock, farewell_seconds
        if self._listeners:
            # Saves under way are finished before what is registered here is called, and daemon threads still live.
            atexit.register(self.close)

    @property
    def listens(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._listeners)

    def tell(self, event: Event) -> None:
        """Have everybody hear of an event, soon."""
        for each in self._listeners:
            each.tell(event)

    def close(self) -> None:
        """Wait a little until everybody has heard everything; tells nothing more."""
        if not self._listeners:
            return
        atexit.unregister(self.close)
        deadline = self._clock.monotonic_seconds() + self._farewell_seconds
        for each in self._listeners:
            each.end()
        for each in self._listeners:
            each.join(max(deadline - self._clock.monotonic_seconds(), 0.0))
        self._listeners = ()


class _Listener:
    """One observer, its events in order, and the thread that tells it of them."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        # Simple: it may be put to by a signal handler in the midst of another put.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._complained = False

    def tell(self, event: Event) -> None:
        if self._events.qsize() >= WAITING_MAX:
            self._lost += 1
            return
        self._events.put(event)
        # Whoever comes while another starts the thread leaves the event to it.
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
        lost = self._lost + max(self._events.qsize() - 1, 0) if self._thread.is_alive() else self._lost
        if lost:
            logger.warning("%s was too slow: %d events did not reach it", _name(self._observer), lost)

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name="holdfast-observer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The host has no thread to spare, or the interpreter is exiting: the next event tries again.
            logger.debug("%s waits for a thread: %s", _name(self._observer), error)
        else:
            self._thread = thread

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._observer.on_event(event)
            except BaseException as error:  # noqa: BLE001 - no observer ends a save, nor silently what it is told
                if not self._complained:
                    logger.warning(
                        "%s failed and is told of what follows all the same; this is said once: %s: %s",
                        _name(self._observer),
                        type(error).__name__,
                        error,
                    )
                self._complained = True


def _name(observer: Observer) -> str:
    return f"observer {type(observer).__name__}"
