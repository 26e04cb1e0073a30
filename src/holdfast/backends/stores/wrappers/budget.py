"""The retries of one save or load together: how long they have taken, how many they were, and the line that says so."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.base.clock import Clock
from holdfast.base.interrupts import GUARD
from holdfast.base.ports.temporary import RetryCounts, TemporaryError

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 5.0
"""How long calls are tried again before the log says so. Shorter troubles are in the counts only."""


class RetryCounter:
    """Counts retries, and the time in which at least one call was being tried again. Any thread may call.

    Calls that are tried again side by side count their time once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._retries = self._throttled = 0
        self._past_seconds = 0.0
        self._in_trouble = 0
        """Calls that are being tried again."""
        self._began = 0.0
        """When the first of them failed."""
        _COUNTERS.add(self)

    @property
    def counts(self) -> RetryCounts:
        """What was counted so far."""
        with GUARD:
            now = self._clock.monotonic_seconds() - self._began if self._in_trouble else 0.0
            return RetryCounts(self._retries, round(self._past_seconds + now, 6), self._throttled)

    def count(self, *, retries: int = 0, throttled: int = 0) -> None:
        """Add to the counts."""
        with GUARD:
            self._retries += retries
            self._throttled += throttled

    def enter(self) -> bool:
        """Record that one more call is being tried again; return whether it is the only one."""
        with GUARD:
            if not self._in_trouble:
                self._began = self._clock.monotonic_seconds()
            self._in_trouble += 1
            return self._in_trouble == 1

    def leave(self) -> bool:
        """Record that a call is not tried again any more; return whether none is."""
        with GUARD:
            self._in_trouble -= 1
            if not self._in_trouble:
                self._past_seconds += self._clock.monotonic_seconds() - self._began
            return not self._in_trouble

    def _forget_threads(self) -> None:
        self._in_trouble = 0


class RetryBudget:
    """Says when the calls of one save or load have been tried again for too long, and logs what it waits for."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        seconds_max: float = math.inf,
        *,
        total: RetryCounter | None = None,
        is_leader: bool = True,
    ) -> None:
        """Begin with nothing spent.

        Args:
            name: Name of the save or load, or the URL of the store.
            clock: Measures the time.
            seconds_max: After so much time of trying again, no call is tried again.
            total: Counts the retries of all saves and loads; None: nothing does.
            is_leader: Whether to warn. Other ranks log at INFO: most likely all ranks meet the same trouble.
        """
        self._name, self._clock = name, clock
        self.seconds_max = seconds_max
        """The most time of trying again."""
        self._level = logging.WARNING if is_leader else logging.INFO
        self._own = RetryCounter(clock)
        self._counters = [self._own] if total is None else [self._own, total]
        self._began = clock.monotonic_seconds()
        """When the trouble that the log is about began."""
        self._is_logged = False

    @property
    def counts(self) -> RetryCounts:
        """What the retries have cost so far."""
        return self._own.counts

    @property
    def is_spent(self) -> bool:
        """Whether no call may be tried again."""
        return self.counts.seconds >= self.seconds_max

    def note_failed(self, error: TemporaryError, *, is_first: bool) -> None:
        """Count a try that failed.

        Args:
            error: Why.
            is_first: Whether it is the first failure of its call: `note_over` must follow.
        """
        for counter in self._counters:
            counter.count(throttled=int(error.is_throttled))
        if is_first and self._enter():
            self._began, self._is_logged = self._clock.monotonic_seconds(), False

    def note_retry(self, error: TemporaryError) -> None:
        """Count a try after a failure; log, once in a trouble, what the save or load waits for."""
        for counter in self._counters:
            counter.count(retries=1)
        seconds = self._clock.monotonic_seconds() - self._began
        if (seconds >= _SILENT_SECONDS or error.is_first_contact) and not self._is_logged:
            self._is_logged = True
            text = "%s: has waited %.0f s for storage, and tries again: %s"
            if error.is_first_contact:
                text = "%s: storage has not answered this process yet (%.0f s), and is tried again: %s"
            logger.log(self._level, text, self._name, seconds, error)

    def note_over(self) -> None:
        """Record that a call which has failed is over: it succeeded, or nobody tries it again."""
        if self._leave() and self._is_logged:
            seconds = self._clock.monotonic_seconds() - self._began
            text = "%s: storage answers again, or was given up, after %.0f s"
            logger.log(self._level, text, self._name, seconds)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Do not count the time of the block, in which a call that has failed waits for something else than storage."""
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> bool:
        is_only, *_ = [counter.enter() for counter in self._counters]
        return is_only

    def _leave(self) -> bool:
        is_over, *_ = [counter.leave() for counter in self._counters]
        return is_over


_COUNTERS: weakref.WeakSet[RetryCounter] = weakref.WeakSet()


def _forget_threads() -> None:
    """Begin without calls: a forked child has none of the threads that make them."""
    for counter in list(_COUNTERS):
        counter._forget_threads()


os.register_at_fork(after_in_child=_forget_threads)
