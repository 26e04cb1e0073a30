"""How long a node that did not answer is asked no more: each call would wait as long, while training waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.base.clock import SystemClock
from holdfast.base.ports.temporary import TemporaryError
from holdfast.base.wire.link import LinkSilent

_SECONDS, _SECONDS_MAX = 2.0, 30.0
"""Calls fail at once after a call without an answer, twice as long as that call has waited, within these bounds."""

_GREETING_SECONDS, _TIMES_GREETING = 3.0, 10
"""The next call waits so long for a greeting. If none comes, calls fail at once so many times as long as that."""

_CLOCK = SystemClock()


class Silence:
    """The silence of one node. Threads that call the node may set another's note: the newest one stands."""

    def __init__(self) -> None:
        self._until_seconds, self._why = -math.inf, ""

    def __bool__(self) -> bool:
        """Return whether the node must greet before it is asked."""
        return bool(self._why)

    def greeting_seconds(self, seconds: float) -> float:
        """Return how long to wait for the greeting of the node, for a call with such a deadline."""
        return min(seconds, _GREETING_SECONDS) if self else seconds

    def end(self) -> None:
        """Note that the node has answered."""
        self._until_seconds, self._why = -math.inf, ""

    @contextmanager
    def noted(self, *, is_work: bool) -> Iterator[None]:
        """Fail at once if the node was silent a moment ago. Note a silence now: that of work is no sign of the next.

        Raises:
            TemporaryError: The node was silent a moment ago, with the error of that call.
        """
        start = _CLOCK.monotonic_seconds()
        if start < self._until_seconds:
            raise TemporaryError(self._why)
        try:
            yield
            self.end()
        except LinkSilent as silent:
            end = _CLOCK.monotonic_seconds()
            times = _TIMES_GREETING if self else 0 if is_work else 2
            seconds = min(times * (end - start), _SECONDS_MAX)
            self._until_seconds, self._why = end + max(_SECONDS, seconds), str(silent)
            raise
