"""A clock whose processor time passes when somebody looks at it, for tests of what is measured."""

from __future__ import annotations

import threading

from holdfast.base.clock import SystemClock


class ClockOfLooks(SystemClock):
    """Time stands still unless the test moves it. The processor time of a thread passes when that thread looks."""

    def __init__(self, seconds_a_look: float) -> None:
        self.seconds = 1000.0
        self.thread = threading.local()
        self._seconds_a_look = seconds_a_look

    def monotonic_seconds(self) -> float:
        return self.seconds

    def thread_seconds(self) -> float:
        self.thread.worked = getattr(self.thread, "worked", 0.0) + self._seconds_a_look
        return float(self.thread.worked)
