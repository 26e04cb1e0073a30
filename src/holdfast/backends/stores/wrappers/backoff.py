"""How long to wait before a call is tried again."""

from __future__ import annotations

from holdfast.base.clock import Clock

FIRST_SECONDS = 0.2
"""Bound of the first wait. Shorter than a person notices, longer than most hiccups of a server."""

LONGEST_SECONDS = 10.0
"""Bound of the later waits. Longer ones would waste much of the deadline once the store answers again."""

_CHANCE_BYTES = 4


def chance(clock: Clock) -> float:
    """Return a random number in [0, 1)."""
    return float(int.from_bytes(clock.random_bytes(_CHANCE_BYTES)) / (1 << 8 * _CHANCE_BYTES))


def wait_seconds(clock: Clock, failures: int, retry_after_seconds: float | None = None) -> float:
    """Return the wait after so many failures in a row: random between nothing and a bound that doubles.

    Random over the whole range, not around its end: thousands of ranks that failed together must not return together.

    Args:
        clock: Source of chance.
        failures: Failures so far, at least one.
        retry_after_seconds: The wait that the server asked for. It is kept, and the random wait is added to it.
    """
    # The exponent is bounded, since 2.0**1024 overflows.
    bound = min(FIRST_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_SECONDS)
    return max(retry_after_seconds or 0.0, 0.0) + chance(clock) * bound
