"""Handlers for the signals that end a job: installed while a loop runs, restored afterwards."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from holdfast.base.clock import Clock

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], object]


class Signals:
    """Signal handlers that only record which signal arrived first, and when."""

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._names, self._clock = names, clock
        self._process = os.getpid()
        # Kept in a field: each access to a bound method creates a new object, and `give_back` compares by identity.
        self._handler: _Handler = self._on_signal
        self._before: dict[int, _Handler | int] = {}
        self._is_over = False
        self._muted_until = -math.inf
        self._is_interrupted = False
        self.received: tuple[int, float] | None = None
        """The first signal received, and its time on the monotonic clock."""

    def take(self) -> None:
        """Install the handlers. Only the main thread can: on another thread this logs a warning."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "signals %s do not end this loop with a save: it runs on thread %s, and Python handles signals on the "
                "main thread only. Signals to other ranks still stop it. To silence this, pass preemption=False",
                list(self._names),
                threading.current_thread().name,
            )
            return
        for name in self._names:
            number = signal.Signals[name]
            before = _handler_below(number)
            if before is None:
                logger.warning(
                    "%s has a handler outside Python that stays in place: the signal does not end the loop with a save",
                    name,
                )
            elif before is not signal.SIG_IGN:
                # A signal that a shell or nohup had set to be ignored stays ignored.
                self._before[number] = before
                signal.signal(number, self._handler)

    def give_back(self, *, hand_on: bool) -> None:
        """Restore the former handlers, except where other code has installed one since.

        Args:
            hand_on: Whether a received signal that no step answered now has its default effect.
        """
        self._is_over = True
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return
        ours = {number: before for number, before in self._before.items() if signal.getsignal(number) is self._handler}
        for number, before in ours.items():
            signal.signal(number, before)
        if hand_on and self.received is not None and _is_default(ours.get(self.received[0])):
            signal.raise_signal(self.received[0])

    def mute(self, until: float) -> None:
        """Ignore further signals until a time on the monotonic clock: the process is about to exit by itself."""
        self._muted_until = until
        self._is_over = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        # A forked child is no rank: a signal to it must have its normal effect at once.
        if self._is_over or os.getpid() != self._process:
            if os.getpid() != self._process or self._clock.monotonic_seconds() >= self._muted_until:
                self._run_former(number, frame)
            return
        # A second Ctrl-C interrupts at once, as without us.
        is_second = self._is_interrupted and number == signal.SIGINT
        self._is_interrupted |= number == signal.SIGINT
        if self.received is None:
            self.received = number, self._clock.monotonic_seconds()
        if not _is_default(before) or is_second:
            self._run_former(number, frame)

    def _run_former(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)


def _handler_below(number: int) -> _Handler | int | None:
    """Return the handler of a signal, below handlers of ours whose loops are over."""
    handler = signal.getsignal(number)
    while isinstance(owner := getattr(handler, "__self__", None), Signals) and owner._is_over:
        handler = owner._before[number]
    return handler


def _is_default(handler: object) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler)
