"""Memory that staged saves borrow: allocated once, reused by every save after, never more than a budget."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from holdfast.engine.host import ranks_on_host
from holdfast.engine.slabs import new_slab
from holdfast.ports.clock import Clock

_BLOCK_SLABS = 16
"""Slabs cut from one allocation: few allocations, and little that is never used."""


class Arena:
    """Equal slabs up to a budget; who wants one while all are out waits for an earlier save to give one back."""

    def __init__(self, slab_bytes: int, bytes_max: int | None, clock: Clock) -> None:
        """Allocate nothing yet.

        Args:
            slab_bytes: Bytes of one slab, a multiple of a page.
            bytes_max: The budget; None for half of the memory that is free when the first save asks.
            clock: Measures waits.
        """
        self.slab_bytes = slab_bytes
        self.waited_seconds = 0.0
        """How long anybody has waited for a slab so far."""
        self._bytes_max, self._clock = bytes_max, clock
        self._changed = threading.Condition()
        self._free: list[memoryview] = []
        self._made = 0

    def holds(self, count: int) -> bool:
        """Return whether the budget allows `count` slabs at once, if nobody else has any."""
        with self._changed:
            if self._bytes_max is None:
                self._bytes_max = free_memory_bytes() // 2 // ranks_on_host()
            return count * self.slab_bytes <= self._bytes_max

    def take(self) -> memoryview:
        """Return a slab, page-aligned, its content arbitrary."""
        with self._changed:
            if not self._free and not self._grow():
                start = self._clock.monotonic_seconds()
                while not self._free:
                    self._changed.wait()
                self.waited_seconds += self._clock.monotonic_seconds() - start
            return self._free.pop()

    def give(self, slab: memoryview) -> None:
        """Put a slab back."""
        with self._changed:
            self._free.append(slab)
            self._changed.notify()

    def _grow(self) -> bool:
        assert self._bytes_max is not None, "who takes has asked whether it fits"
        count = min(_BLOCK_SLABS, self._bytes_max // self.slab_bytes - self._made)
        if count <= 0:
            return False
        block = new_slab(count * self.slab_bytes)
        self._made += count
        # The first one taken is the first of the block.
        cuts = range((count - 1) * self.slab_bytes, -1, -self.slab_bytes)
        self._free += [block[at : at + self.slab_bytes] for at in cuts]
        return True


def free_memory_bytes() -> int:
    """Return the bytes this process may still take: what the host has available, within its control group's limit."""
    available = _first_number(Path("/proc/meminfo"), after="MemAvailable:")
    free = available * 1024 if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _first_number(Path("/sys/fs/cgroup/memory.max"))
    used = _first_number(Path("/sys/fs/cgroup/memory.current"))
    return free if limit is None or used is None else max(min(free, limit - used), 0)


def _first_number(path: Path, after: str = "") -> int | None:
    """Return the number that follows a word in a file of the kernel, or None if there is none."""
    try:
        words = path.read_text().partition(after)[2].split() if after else path.read_text().split()
    except OSError:
        return None
    return int(words[0]) if words and words[0].isdigit() else None
