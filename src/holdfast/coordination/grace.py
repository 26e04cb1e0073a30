"""Whether a save fits what is left of a grace: a pure function of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

MARGIN = 1.25
"""How much longer than expected a save may take: storage is seldom faster when a whole cluster is told to end."""

RESERVE, RESERVE_SECONDS_MAX = 0.1, 2.0
"""How much of a grace is left to the end of the process, as a share and at most."""


def usable_seconds(grace_seconds: float) -> float:
    """Return how long after a signal a save may end."""
    return grace_seconds - min(grace_seconds * RESERVE, RESERVE_SECONDS_MAX)


def expected_seconds(
    measured: Sequence[float], under_way: Sequence[float], held_bytes: int, bytes_per_second: float | None
) -> float:
    """Return how long a save that begins now is expected to take on one rank.

    Args:
        measured: How long the last saves took.
        under_way: For how long saves have been under way that come first.
        held_bytes: What this rank writes; counts only where nothing was measured.
        bytes_per_second: What storage takes; likewise.
    """
    if measured:
        each = max(measured)
    else:
        each = 0.0 if not held_bytes or bytes_per_second is None else held_bytes / bytes_per_second
    return each + sum(max(each - age, 0.0) for age in under_way)


def fits(expected: Sequence[float], left_seconds: float) -> bool:
    """Return whether a save fits: the slowest rank's, with a margin."""
    return MARGIN * max(expected) <= left_seconds
