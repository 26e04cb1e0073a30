"""The retries of one save or load together: how long they have taken, how many they were, and the line that says so."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.clock import Clock
from holdfast.ports.temporary import RetryCounts, TemporaryError

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 5.0
"""How long calls are tried again before the log says so. Shorter troubles are in the counts only."""


class RetryBudget:
    """Counts the retries of one save or load, and says when they have taken too long. Any thread may call.

    A store is in trouble while at least one call is being tried again. Calls that are tried again side by side count
    their time once.
    """

    def __init__(self, name: str, clock: Clock, seconds_max: float = math.inf, *, is_leader: bool = True) -> None:
        """Begin with nothing spent.

        Args:
            name: Name of the save or load, or the URL of the store.
            clock: Measures the time.
            seconds_max: After so much time in trouble no call is tried again.
            is_leader: Whether to warn; other ranks log at INFO, since most likely all ranks meet the same trouble.
        """
        self._name, self._clock, self._seconds_max = name, clock, seconds_max
        self._level = logging.WARNING if is_leader else logging.INFO
        self._lock = threading.Lock()
        self._retries = self._throttled = 0
        self._past_seconds = 0.0
        self._in_trouble = 0
        """Calls that are being tried again."""
        self._began = 0.0
        """When the first of them failed."""
        self._is_logged = False

    @property
    def counts(self) -> RetryCounts:
        """What the retries have cost so far."""
        with self._lock:
            return RetryCounts(self._retries, round(self._seconds(), 6), self._throttled)

    @property
    def is_spent(self) -> bool:
        """Whether no call may be tried again."""
        with self._lock:
            return self._seconds() >= self._seconds_max

    @property
    def seconds_max(self) -> float:
        """The most time in trouble."""
        return self._seconds_max

    def _seconds(self) -> float:
        now = self._clock.monotonic_seconds() - self._began if self._in_trouble else 0.0
        return self._past_seconds + now

    def note_failed(self, error: TemporaryError, *, is_first: bool) -> None:
        """Count a try that failed.

        Args:
            error: Why.
            is_first: Whether it is the first failure of its call: `note_over` must follow.
        """
        with self._lock:
            self._throttled += error.is_throttled
            if is_first:
                if not self._in_trouble:
                    self._is_logged = False
                self._enter()

    def note_retry(self, error: TemporaryError) -> None:
        """Count a try after a failure; log, once in a trouble, what the save or load waits for."""
        with self._lock:
            self._retries += 1
            seconds = self._clock.monotonic_seconds() - self._began
            is_due = seconds >= _SILENT_SECONDS and not self._is_logged
            self._is_logged |= is_due
        if is_due:
            text = "%s: has waited %.0f s for storage, and tries again: %s"
            logger.log(self._level, text, self._name, seconds, error)

    def note_over(self) -> None:
        """Record that a call which has failed is over: it succeeded, or nobody tries it again."""
        with self._lock:
            seconds = self._clock.monotonic_seconds() - self._began
            self._leave()
            is_over = self._is_logged and not self._in_trouble
        if is_over:
            text = "%s: storage answers again, or was given up, after %.0f s"
            logger.log(self._level, text, self._name, seconds)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Do not count the time of the block, in which a call that has failed waits for something else than storage."""
        with self._lock:
            self._leave()
        try:
            yield
        finally:
            with self._lock:
                self._enter()

    def _enter(self) -> None:
        if not self._in_trouble:
            self._began = self._clock.monotonic_seconds()
        self._in_trouble += 1

    def _leave(self) -> None:
        self._in_trouble -= 1
        if not self._in_trouble:
            self._past_seconds += self._clock.monotonic_seconds() - self._began
