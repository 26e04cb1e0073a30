"""Signals that tell this process to end: taken while a loop runs, given back afterwards."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from holdfast.clock import Clock

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], object]


class Signals:
    """Handlers that do nothing but note that a signal came, and when."""

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._names, self._clock = names, clock
        self._process = os.getpid()
        # Kept, since each access makes another: what is installed is known again by it.
        self._handler: _Handler = self._on_signal
        self._before: dict[int, _Handler | int] = {}
        self._is_over = False
        self._muted_until = -math.inf
        self._is_interrupted = False
        self.received: tuple[int, float] | None = None
        """The first signal that came, and when on the monotonic clock."""

    def take(self) -> None:
        """Install the handlers, on the main thread; elsewhere nothing but a warning comes of it."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "signals %s do not end this loop with a save: it runs on thread %s, and Python handles signals on the "
                "main thread only. Signals of other ranks count all the same; preemption=False if that is as it should",
                list(self._names),
                threading.current_thread().name,
            )
            return
        for name in self._names:
            number = signal.Signals[name]
            before = _beneath(number)
            if before is None:
                logger.warning("%s is handled by something other than Python, and is left to it", name)
            elif before is not signal.SIG_IGN:
                # What a shell or nohup had ignored stays ignored.
                self._before[number] = before
                signal.signal(number, self._handler)

    def give_back(self, *, hand_on: bool) -> None:
        """Put back what was installed before, where nobody has put something else there since.

        Args:
            hand_on: Whether a signal that nobody answered does now what it would have done without us.
        """
        self._is_over = True
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return
        own = {number: before for number, before in self._before.items() if signal.getsignal(number) is self._handler}
        for number, before in own.items():
            signal.signal(number, before)
        if hand_on and self.received is not None and _is_default(own.get(self.received[0])):
            signal.raise_signal(self.received[0])

    def mute(self, until: float) -> None:
        """Have no further signal end this process, which is about to end, until a time on the monotonic clock."""
        self._muted_until = until
        self._is_over = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        # A child that was forked is no rank, and whoever ends it must not be kept waiting.
        if self._is_over or os.getpid() != self._process:
            if os.getpid() != self._process or self._clock.monotonic_seconds() >= self._muted_until:
                self._as_before(number, frame)
            return
        is_second = self._is_interrupted and number == signal.SIGINT
        self._is_interrupted |= number == signal.SIGINT
        if self.received is None:
            self.received = number, self._clock.monotonic_seconds()
        if not _is_default(before) or is_second:
            self._as_before(number, frame)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)


def _beneath(number: int) -> _Handler | int | None:
    """Return what handles a signal, apart from handlers of ours whose loops are over."""
    handler = signal.getsignal(number)
    while isinstance(owner := getattr(handler, "__self__", None), Signals) and owner._is_over:
        handler = owner._before[number]
    return handler


def _is_default(handler: object) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler)
