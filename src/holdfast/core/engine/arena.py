"""The memory that staged saves borrow: allocated once, reused by every later save, limited by a budget."""

from __future__ import annotations

import heapq
import logging
import os
import queue
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from holdfast.base.clock import Clock
from holdfast.base.ports.framework import Pin, Unpin
from holdfast.core.engine.buffers import QUARANTINED, address_of, allocate_aligned
from holdfast.core.engine.memory_limits import MemoryShare
from holdfast.settings import MIB

logger = logging.getLogger(__name__)

_BLOCK_BUFFERS_MAX, _BLOCK_BYTES_MAX = 64, 64 * MIB
"""Buffers cut from one allocation, fewer if they are large: few allocations, and little memory that stays unused."""


class Arena:
    """Equal buffers up to a budget. `take` blocks while all of them are in use and the budget is spent.

    One thread takes buffers, and allocates them. Any thread gives buffers back. Operations are atomic, without a lock:
    a signal handler may save while the training thread is in here.
    """

    def __init__(
        self, buffer_bytes: int, bytes_max: int | None, clock: Clock, memory: MemoryShare | None = None
    ) -> None:
        """Allocate nothing yet.

        Args:
            buffer_bytes: Bytes of one buffer, a multiple of a page.
            bytes_max: The budget; None: half of this rank's share of the memory that is free at the first use.
            clock: Measures waits.
            memory: This rank's share of the free memory; None for a process alone.
        """
        self.buffer_bytes = buffer_bytes
        self.waited_seconds = 0.0
        """Seconds that callers of `take` have waited so far."""
        self._bytes_max, self._clock, self._memory = bytes_max, clock, memory or MemoryShare()
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the thread that waits in `take`."""
        self._free: list[tuple[int, memoryview]] = []
        """A heap of buffers by place."""
        self._places: dict[int, int] = {}
        """By address of a buffer, how many were allocated before it."""
        self._allocated = self._freed = 0
        self._pin: Pin | None = None
        self._unpinned: list[memoryview] = []
        """Blocks to pin, once it is known how."""
        self._cannot_pin = False
        self._process = os.getpid()
        self._pinned: list[tuple[memoryview, Unpin]] = []
        self._quarantined: list[memoryview] = []
        # A device would still write to pinned memory after it is freed. So the list that unpins holds the memory too,
        # and the finalizer unpins before it frees.
        weakref.finalize(self, _unpin, self._pinned, self._quarantined, self._process).atexit = False

    @property
    def retired(self) -> int:
        """Buffers that were quarantined."""
        return len(self._quarantined)

    @property
    def _count(self) -> int:
        """Buffers that are lent, or may be."""
        return self._allocated - self._freed - self.retired

    def pin(self, pin: Pin) -> None:
        """Pin all memory, present and future; only the first call counts."""
        if self._pin is None:
            self._pin = pin
            self._pin_blocks()

    def holds(self, count: int, bytes_max: int | None = None) -> bool:
        """Return whether the budget has room for this many buffers, including those in use, and for one at least.

        Args:
            count: Buffers.
            bytes_max: As for `take`.
        """
        return max(count, 1) * self.buffer_bytes <= self._limit(bytes_max)

    def take(self, given_up: Callable[[], bool], bytes_max: int | None = None) -> memoryview | None:
        """Return a buffer, waiting for one if needed; None once the caller has given up or no buffer can come back.

        Args:
            given_up: Whether the caller has given up; called before each wait, and after a change or `wake`.
            bytes_max: Size to which the arena may grow for this buffer, within its budget; at least one buffer.
        """
        self._forget_changes()
        while not self._free and not self._grow(bytes_max):
            # If no buffer exists, all were quarantined, and none will come back.
            if given_up() or not self._count:
                return None
            start = self._clock.monotonic_seconds()
            self._changes.get()
            self.waited_seconds += self._clock.monotonic_seconds() - start
            self._forget_changes()
        # The first one, so that buffers taken in turn mostly follow each other in memory. A save that needs few
        # uses the same few again, which are still in the processor's cache. Not the one at the lowest address: a
        # block often lies below the one before it, and then memory that no save has touched would be written.
        return heapq.heappop(self._free)[1]

    def give(self, buffer: memoryview) -> None:
        """Return a buffer to the arena."""
        self._add_free(buffer)
        self.wake()

    def quarantine_buffer(self, buffer: memoryview) -> None:
        """Never lend a buffer again, nor free or unpin its memory: a device may still copy into it.

        The budget shrinks by one buffer.
        """
        QUARANTINED.append(buffer)
        self._quarantined.append(buffer)
        self.wake()

    def wake(self) -> None:
        """Make the caller that waits in `take` check again whether it has given up."""
        if self._changes.empty():  # If not, the thread that waits has yet to look, and sees this change too.
            self._changes.put(None)

    def close(self) -> None:
        """Free the buffers that are not in use, and unpin all memory once none is."""
        with suppress(IndexError):
            while True:
                self._free.pop()
                self._freed += 1
        if not self._count:
            _unpin(self._pinned, self._quarantined, self._process)
            self._unpinned.clear()
            self._places.clear()

    def _budget(self) -> int:
        if self._bytes_max is None:
            self._bytes_max = self._memory.free_bytes() // 2
        return self._bytes_max - self.retired * self.buffer_bytes

    def _limit(self, bytes_max: int | None) -> int:
        budget = self._budget()
        return budget if bytes_max is None else min(budget, max(bytes_max, self.buffer_bytes))

    def _grow(self, bytes_max: int | None) -> bool:
        budget = self._limit(bytes_max)
        at_once = min(_BLOCK_BUFFERS_MAX, max(_BLOCK_BYTES_MAX // self.buffer_bytes, 1))
        count = min(at_once, budget // self.buffer_bytes - self._count)
        if count <= 0:
            return False
        block = allocate_aligned(count * self.buffer_bytes)
        self._unpinned.append(block)
        for at in range(0, count * self.buffer_bytes, self.buffer_bytes):
            buffer = block[at : at + self.buffer_bytes]
            self._places[address_of(buffer)] = self._allocated
            self._allocated += 1
            self._add_free(buffer)
        self._pin_blocks()
        return True

    def _forget_changes(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._changes.get_nowait()

    def _add_free(self, buffer: memoryview) -> None:
        heapq.heappush(self._free, (self._places[address_of(buffer)], buffer))

    def _pin_blocks(self) -> None:
        with suppress(IndexError):  # None is left.
            while self._pin is not None and not self._cannot_pin:
                self._pin_block(self._unpinned.pop(0), self._pin)

    def _pin_block(self, block: memoryview, pin: Pin) -> None:
        try:
            self._pinned.append((block, pin(block)))
        except Exception as error:  # noqa: BLE001 - unpinned memory works too, only slower
            self._cannot_pin = True
            logger.warning("memory for staged copies is not pinned, so copies take longer: %s", error)


def _unpin(pinned: list[tuple[memoryview, Unpin]], quarantined: Sequence[memoryview], process: int) -> None:
    """Unpin and release memory, but for what is quarantined. A forked child only releases: its parent has the pins."""
    while pinned:
        block, unpin = pinned.pop()
        if os.getpid() == process and all(buffer.obj is not block.obj for buffer in quarantined):
            unpin()
