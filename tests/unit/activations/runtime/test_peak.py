"""The measured peak of a call."""

from __future__ import annotations

import torch

from holdfast.activations.runtime.measure import least_seconds, timed
from holdfast.activations.runtime.peak import peak_bytes

KIB = 1024


def test_peak_is_the_most_bytes_at_a_time() -> None:
    def call() -> torch.Tensor:
        first = torch.zeros(40 * KIB, dtype=torch.uint8)
        second = torch.zeros(24 * KIB, dtype=torch.uint8)
        del first
        third = torch.zeros(8 * KIB, dtype=torch.uint8)
        return second[:1] + third[:1]

    result, peak = peak_bytes(call, torch.device("cpu"))
    assert result.item() == 0
    assert 64 * KIB <= peak < 65 * KIB


def test_memory_of_before_does_not_count() -> None:
    before = torch.zeros(64 * KIB, dtype=torch.uint8)
    _, peak = peak_bytes(lambda: before.view(torch.int32)[:256].clone(), torch.device("cpu"))
    assert KIB <= peak < 2 * KIB


class Steps:
    """A clock that goes on by the next of some numbers at each call."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self._now = list(seconds), 0.0

    def monotonic_seconds(self) -> float:
        self._now += self._seconds.pop(0)
        return self._now

    thread_seconds = monotonic_seconds


def test_seconds_are_those_of_the_shortest_round() -> None:
    assert timed(lambda: 7, None, clock=Steps(1.0, 2.5)) == (7, 2.5)
    assert least_seconds(lambda: 7, None, 3, clock=Steps(0, 3, 0, 2, 0, 4)) == 2
