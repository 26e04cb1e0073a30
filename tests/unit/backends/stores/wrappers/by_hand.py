"""A clock that only sleeping moves, and chance from a seed, so that a test of hours takes milliseconds."""

from __future__ import annotations

import random

from holdfast.base.clock import SystemClock


class ClockBySleep(SystemClock):
    def __init__(self, seed: int = 0) -> None:
        self.seconds = 1000.0
        self.slept: list[float] = []
        self._chance = random.Random(seed)

    def monotonic_seconds(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.seconds += seconds

    def random_bytes(self, count: int) -> bytes:
        return self._chance.randbytes(count)
