"""The memory of records between the step that consumed their gradients and the seal."""

from __future__ import annotations

import queue

from holdfast.base.clock import Clock
from holdfast.core.engine.buffers import allocate_aligned
from holdfast.errors import UnavailableError
from holdfast.settings import MIB

_BYTES_MIN = 64 * MIB
"""The budget is two records, or this, whichever is more."""

_WAIT_SECONDS = 1.0
"""Longest wait of training for memory."""

_WAITING_SHARE = 0.01
"""Largest share of the time that training may wait, over the last window."""

_WINDOW_SECONDS = 60.0


class LogMemory:
    """Buffers of records up to a budget. The training thread takes; any thread gives back.

    Memory is kept and lent again: the first touch of a page costs more than the copy into the page. No lock: a signal
    handler may step an optimizer while the training thread is in here.
    """

    def __init__(self, clock: Clock) -> None:
        """Allocate nothing yet."""
        self._clock = clock
        self._returned: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._free: list[memoryview] = []
        self._lent_bytes = self._record_bytes = self._largest = 0
        self.record_bytes_max = 0
        """The budget holds two records of this size at most: a record may have the steps of a whole epoch."""
        self._waits: list[tuple[float, float]] = []
        self.waited_seconds = 0.0
        """Seconds that training has waited so far."""

    def take(self, count: int) -> memoryview:
        """Return so many bytes, waiting a second at most.

        Raises:
            UnavailableError: The seals are too slow: no memory came back in time.
        """
        self._record_bytes += count
        self._largest = max(self._largest, min(self._record_bytes, self.record_bytes_max))
        self._take_returned()
        if self._lent_bytes and self._lent_bytes + count > self._bytes_max:
            self._wait_for(count)
        self._lent_bytes += count
        fitting = [number for number, buffer in enumerate(self._free) if count <= len(buffer) <= 2 * count + MIB]
        buffer = self._free.pop(fitting[-1]) if fitting else allocate_aligned(max(count, 1))
        return buffer[:count]

    def end_record(self) -> bool:
        """End a record; return whether the next one may not fit unless those that wait are sealed."""
        self._record_bytes = 0
        self._take_returned()
        return 2 * self._lent_bytes >= self._bytes_max

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back."""
        self._returned.put(buffer)

    @property
    def _bytes_max(self) -> int:
        return max(2 * self._largest, _BYTES_MIN)

    def _take_returned(self, seconds: float | None = None) -> None:
        """Take returned buffers; wait for the first buffer if a time is given."""
        try:
            while True:
                buffer = self._returned.get(timeout=seconds) if seconds else self._returned.get_nowait()
                self._lent_bytes -= len(buffer)
                self._free.append(buffer)
                seconds = None
        except queue.Empty:
            pass
        while self._free and sum(map(len, self._free)) + self._lent_bytes > self._bytes_max + self._largest:
            self._free.pop(0)

    def _wait_for(self, count: int) -> None:
        clock, began = self._clock, self._clock.monotonic_seconds()
        self._waits = [wait for wait in self._waits if wait[0] > began - _WINDOW_SECONDS]
        waited = sum(seconds for _, seconds in self._waits)
        left = min(_WAIT_SECONDS, max(_WAITING_SHARE * _WINDOW_SECONDS - waited, 0.0))
        try:
            while self._lent_bytes and self._lent_bytes + count > self._bytes_max:
                seconds = began + left - clock.monotonic_seconds()
                if seconds <= 0:
                    raise UnavailableError(
                        f"the redo log has {self._lent_bytes} bytes of records that are not sealed, and needs {count} "
                        f"more; expected a seal within {left:.1f} s. The storage is too slow for a record a step"
                    )
                self._take_returned(min(seconds, 0.05))
        finally:
            self.waited_seconds += clock.monotonic_seconds() - began
            self._waits.append((began, clock.monotonic_seconds() - began))
