"""How long a node that did not answer is asked no more: each call would wait as long, while training waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.base.clock import SystemClock
from holdfast.base.ports.temporary import TemporaryError
from holdfast.base.wire.link import LinkSilent

_SECONDS, _SECONDS_MAX = 2.0, 30.0
"""Calls fail at once after a call without an answer, twice as long as that call has waited, within these bounds."""

_GREETING_SECONDS, _TIMES_GREETING = 3.0, 10
"""The next call waits so long for a greeting. If none comes, calls fail at once so many times as long as that."""

_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class _SilentUntil:
    seconds: float = -math.inf
    """Until when calls fail at once."""

    why: str = ""
    """The error of the call that had no answer."""

    must_greet: bool = False
    """Whether the next call waits for a greeting first."""


class Silence:
    """The silence of one node. Any thread may make any call: a note is replaced whole."""

    def __init__(self) -> None:
        self._note = _SilentUntil()

    def __bool__(self) -> bool:
        """Return whether the node must greet soon before it is asked."""
        return self._note.must_greet

    def greeting_seconds(self, seconds: float) -> float:
        """Return how long to wait for the greeting of the node, for a call with such a deadline."""
        return min(seconds, _GREETING_SECONDS) if self else seconds

    @contextmanager
    def noted(self, *, is_work: bool) -> Iterator[None]:
        """Fail at once if the node was silent a moment ago. Note a silence now: that of work is no sign of the next.

        Raises:
            TemporaryError: The node was silent a moment ago, with the error of that call.
        """
        begun_seconds, note = _CLOCK.monotonic_seconds(), self._note
        if begun_seconds < note.seconds:
            raise TemporaryError(note.why)
        try:
            yield
        except LinkSilent as silent:
            end_seconds, others = _CLOCK.monotonic_seconds(), self._note
            # The note of the beginning: another thread may have noted the same silence since.
            times = 0 if is_work else _TIMES_GREETING if note.must_greet else 2
            seconds = max(_SECONDS, min(times * (end_seconds - begun_seconds), _SECONDS_MAX))
            until_seconds = max(end_seconds + seconds, others.seconds)
            self._note = _SilentUntil(until_seconds, str(silent), not is_work or others.must_greet)
            raise
        self._note = _SilentUntil()
