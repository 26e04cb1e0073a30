"""Memory that staged saves borrow: allocated once, reused by every save after, never more than a budget."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.engine.buffers import QUARANTINED, allocate_aligned
from holdfast.engine.memory_limits import free_memory_bytes, ranks_on_host
from holdfast.ports.framework import Pin, Unpin
from holdfast.settings import MIB

logger = logging.getLogger(__name__)

_BLOCK_BUFFERS, _BLOCK_BYTES_MAX = 64, 64 * MIB
"""Buffers cut from one allocation, or fewer large ones: few allocations, and little that is never used."""


class Arena:
    """Equal buffers up to a budget; who finds none free waits for one to come back."""

    def __init__(self, buffer_bytes: int, bytes_max: int | None, clock: Clock) -> None:
        """Allocate nothing yet.

        Args:
            buffer_bytes: Bytes of one buffer, a multiple of a page.
            bytes_max: The budget; None for half of the memory that is free when it is first asked for.
            clock: Measures waits.
        """
        self.buffer_bytes = buffer_bytes
        self.waited_seconds = 0.0
        """How long buffers have been waited for so far."""
        self.retired = 0
        """Buffers that are never lent again."""
        self._bytes_max, self._clock = bytes_max, clock
        # Reentrant: a signal handler may save while this thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._free: list[memoryview] = []
        self._made = 0
        self._blocks: list[memoryview] = []
        self._pin: Pin | None = None
        self._cannot_pin = False
        self._process = os.getpid()
        self._pinned: list[tuple[memoryview, Unpin]] = []
        # Memory that is freed while it is pinned would still be written to by the device, where it was: what unpins
        # holds it.
        weakref.finalize(self, _unpin, self._pinned, self._process).atexit = False

    def pin(self, pin: Pin) -> None:
        """Have the memory pinned by the first who can, what is there already and what comes."""
        with self._changed:
            if self._pin is None:
                self._pin = pin
                for block in self._blocks:
                    self._pin_block(block)

    def holds(self, count: int) -> bool:
        """Return whether so many buffers fit the budget, those in use included, and it is of any use at all."""
        return max(count, 1) * self.buffer_bytes <= self._budget()

    def take(self, given_up: Callable[[], bool], bytes_max: int | None = None) -> memoryview | None:
        """Return a buffer, waiting for one to come back if need be; None once its user has given up, or none can come.

        Args:
            given_up: Asked before a wait, and after it whenever something changed or `wake` was called.
            bytes_max: What the arena may grow to for this buffer, within its budget, though to one buffer at least.
        """
        with self._changed:
            while not self._free and not self._grow(bytes_max):
                # With none made, all that there were are retired, and none will come back.
                if given_up() or not self._made:
                    return None
                start = self._clock.monotonic_seconds()
                self._changed.wait()
                self.waited_seconds += self._clock.monotonic_seconds() - start
            # The buffer used a moment ago is the one still in the processor's cache.
            return self._free.pop()

    def give(self, buffer: memoryview) -> None:
        """Put a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def quarantine_buffer(self, buffer: memoryview) -> None:
        """Never lend a buffer again, nor free or unpin its memory: a device may still copy into it.

        The budget is that much less from now on.
        """
        with self._changed:
            QUARANTINED.append(buffer)
            self.retired += 1
            self._made -= 1
            self._bytes_max = self._budget() - self.buffer_bytes
            self._blocks[:] = [block for block in self._blocks if block.obj is not buffer.obj]
            self._pinned[:] = [each for each in self._pinned if each[0].obj is not buffer.obj]
            self._changed.notify_all()

    def wake(self) -> None:
        """Have those who wait ask again whether they have given up."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of the memory that nobody uses."""
        with self._changed:
            self._made -= len(self._free)
            self._free.clear()
            if not self._made:
                _unpin(self._pinned, self._process)
                self._blocks.clear()

    def _budget(self) -> int:
        with self._changed:
            if self._bytes_max is None:
                self._bytes_max = free_memory_bytes() // 2 // ranks_on_host()
            return self._bytes_max

    def _grow(self, bytes_max: int | None) -> bool:
        budget = self._budget()
        if bytes_max is not None:
            budget = min(budget, max(bytes_max, self.buffer_bytes))
        at_once = min(_BLOCK_BUFFERS, max(_BLOCK_BYTES_MAX // self.buffer_bytes, 1))
        count = min(at_once, budget // self.buffer_bytes - self._made)
        if count <= 0:
            return False
        block = allocate_aligned(count * self.buffer_bytes)
        self._blocks.append(block)
        self._made += count
        # The first one taken is the first of the block.
        cuts = range((count - 1) * self.buffer_bytes, -1, -self.buffer_bytes)
        self._free += [block[at : at + self.buffer_bytes] for at in cuts]
        self._pin_block(block)
        return True

    def _pin_block(self, block: memoryview) -> None:
        if self._pin is None or self._cannot_pin:
            return
        try:
            self._pinned.append((block, self._pin(block)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the memory is as good as before
            self._cannot_pin = True
            logger.warning("memory for copies of what is saved is not pinned, so copies take longer: %s", error)


def _unpin(pinned: list[tuple[memoryview, Unpin]], process: int) -> None:
    """Unpin memory, and let go of it; in a forked child the pins are the parent's."""
    while pinned:
        _, unpin = pinned.pop()
        if os.getpid() == process:
            unpin()
