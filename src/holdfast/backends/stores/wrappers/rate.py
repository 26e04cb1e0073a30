"""The cap on the bytes per second that a job sends: each object waits until those before it have used up their time."""

from __future__ import annotations

from holdfast.base.clock import Clock
from holdfast.base.interrupts import GUARD
from holdfast.settings import KIB

SMALL_BYTES_MAX = 64 * KIB
"""An object up to this size goes out at once. A heartbeat or a manifest has a few hundred bytes."""


class RateLimit:
    """Spaces objects so that their bytes keep within a rate. Any thread may call.

    An object of `n` bytes keeps the line busy for `n / rate` seconds, and the next one begins after that. So within any
    time at most the bytes of that time go out, and one object more: a tenth over the rate in the time of ten objects.
    """

    def __init__(self, bytes_per_second: float, clock: Clock) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._free_at = 0.0

    def wait(self, sent_bytes: int) -> float:
        """Wait until an object may be sent; return the seconds waited.

        Args:
            sent_bytes: Its size. One that is sent again counts again.
        """
        with GUARD:
            now = self._clock.monotonic_seconds()
            begin = max(self._free_at, now)
            self._free_at = begin + sent_bytes / self._rate
        seconds = begin - now
        # A small object counts, and does not wait: a heartbeat behind packs would come too late.
        if seconds <= 0 or sent_bytes <= SMALL_BYTES_MAX:
            return 0.0
        self._clock.sleep(seconds)
        return seconds
