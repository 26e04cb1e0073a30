"""Decides whether a save fits the rest of a grace period: a pure function of measured durations."""

from __future__ import annotations

from collections.abc import Sequence

MARGIN = 1.25
"""Factor on the expected duration: storage is often slower when a whole cluster saves after a signal."""

RESERVE, RESERVE_SECONDS_MAX = 0.1, 2.0
"""Part of the grace reserved for the exit of the process: a share of it, and an upper limit in seconds."""


def usable_seconds(grace_seconds: float) -> float:
    """Return how many seconds after a signal a save must have ended."""
    return grace_seconds - min(grace_seconds * RESERVE, RESERVE_SECONDS_MAX)


def expected_seconds(
    measured: Sequence[float], under_way: Sequence[float], held_bytes: int, bytes_per_second: float | None
) -> float:
    """Return how many seconds a save that begins now is expected to take on one rank.

    Args:
        measured: Seconds that the last saves took.
        under_way: Age in seconds of each save under way; they finish before the new one.
        held_bytes: Bytes that this rank writes. Counts only if nothing was measured.
        bytes_per_second: Write speed of storage; None if unknown. Counts only if nothing was measured.
    """
    if measured:
        save_seconds = max(measured)
    else:
        save_seconds = 0.0 if not held_bytes or bytes_per_second is None else held_bytes / bytes_per_second
    return save_seconds + sum(max(save_seconds - age, 0.0) for age in under_way)


def fits(expected: Sequence[float], left_seconds: float) -> bool:
    """Return whether the save of the slowest rank fits, with a margin.

    Args:
        expected: Expected seconds of each rank.
        left_seconds: Seconds left of the grace.
    """
    return MARGIN * max(expected) <= left_seconds
