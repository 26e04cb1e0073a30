"""The only source of time and randomness, so that a test can replay a run exactly."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Time and random bytes."""

    def monotonic_seconds(self) -> float:
        """Return seconds on a clock that never steps back. Decisions use no other clock."""
        ...

    def unix_seconds(self) -> float:
        """Return wall-clock seconds since 1970, for people to read."""
        ...

    def thread_seconds(self) -> float:
        """Return the processor seconds that the calling thread has taken so far."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after this many seconds."""
        ...

    def random_bytes(self, count: int) -> bytes:
        """Return `count` unpredictable bytes."""
        ...


class SystemClock:
    """The machine's own time and randomness."""

    def monotonic_seconds(self) -> float:
        """Return seconds on the machine's monotonic clock."""
        return time.monotonic()

    def unix_seconds(self) -> float:
        """Return wall-clock seconds since 1970."""
        return time.time()

    def thread_seconds(self) -> float:
        """Return the processor seconds of the calling thread, without those of its waits."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        """Return after this many seconds; other threads run meanwhile."""
        time.sleep(seconds)

    def random_bytes(self, count: int) -> bytes:
        """Return `count` bytes from the operating system."""
        return os.urandom(count)


def utc_now_text(clock: Clock) -> str:
    """Return the time in the form of a manifest: ISO 8601 in UTC."""
    return datetime.fromtimestamp(clock.unix_seconds(), UTC).isoformat(timespec="seconds")
