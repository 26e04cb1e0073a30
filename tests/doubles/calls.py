"""The calls that a store gets: which, when, from which thread, and with a delay, as of a network.

A wrapper records each call of the port. Parts of an upload are not recorded, the beginning of an upload is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from holdfast.base.clock import Clock, SystemClock
from holdfast.base.ports.forwarding import ForwardingStore
from holdfast.base.ports.store import Store

_Result = TypeVar("_Result")

_TEXT_MAX = 60
"""Longest subject in a table."""


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One call of a store."""

    name: str
    """Method of the port."""

    subject: str
    """Key or prefix; several keys are joined by ','."""

    thread: str
    """Name of the calling thread."""

    began_seconds: float
    """When the call began, since the store was wrapped."""

    seconds: float
    """How long the call took, the delay included."""

    @property
    def ended_seconds(self) -> float:
        """When the call ended, since the store was wrapped."""
        return self.began_seconds + self.seconds

    def __str__(self) -> str:
        """Return a line for a table."""
        times = f"{self.began_seconds:8.3f} {self.seconds:7.3f}"
        return f"{times} {self.thread:18} {self.name:14} {self.subject[:_TEXT_MAX]}"


class RecordingStore(ForwardingStore):
    """A store that records every call, and may answer late."""

    def __init__(self, inner: Store, clock: Clock | None = None, delay_seconds: float = 0.0) -> None:
        """Wrap `inner`.

        Args:
            inner: The store.
            clock: Measures the calls; None for that of the machine.
            delay_seconds: How long each call waits before it is passed on.
        """
        super().__init__(inner)
        self._clock = clock or SystemClock()
        self._start = self._clock.monotonic_seconds()
        self._lock = threading.Lock()
        self._calls: list[StoreCall] = []
        self._watchers: list[Callable[[str, str], None]] = []
        self.delay_seconds = delay_seconds
        """How long each call waits before it is passed on."""

    def take(self) -> list[StoreCall]:
        """Return the calls that ended since the last `take`, by their beginning."""
        with self._lock:
            calls, self._calls = self._calls, []
        return sorted(calls, key=lambda call: call.began_seconds)

    @contextmanager
    def watched(self, watch: Callable[[str, str], None]) -> Iterator[None]:
        """Have a function take name and subject of each call in the block, before it is passed on; it may wait."""
        self._watchers.append(watch)
        try:
            yield
        finally:
            self._watchers.remove(watch)

    def _around(self, name: str, subject: str, call: Callable[[], _Result]) -> _Result:
        began = self._clock.monotonic_seconds()
        for watch in tuple(self._watchers):
            watch(name, subject)
        if self.delay_seconds:
            self._clock.sleep(self.delay_seconds)
        try:
            return call()
        finally:
            seconds = self._clock.monotonic_seconds() - began
            made = StoreCall(name, subject, threading.current_thread().name, began - self._start, seconds)
            with self._lock:
                self._calls.append(made)


def rounds(calls: Sequence[StoreCall]) -> int:
    """Return the greatest number of calls of which each began after the one before had ended."""
    count, ended = 0, -1.0
    for call in sorted(calls, key=lambda call: call.ended_seconds):
        if call.began_seconds >= ended:
            count, ended = count + 1, call.ended_seconds
    return count


def table(calls: Sequence[StoreCall]) -> str:
    """Return the calls as lines: beginning, duration, thread, method and subject."""
    return "\n".join(map(str, calls))
