"""Memory that staged saves borrow: allocated once, reused by every save after, never more than a budget."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast.engine.host import ranks_on_host
from holdfast.engine.slabs import new_slab
from holdfast.ports.clock import Clock
from holdfast.settings import MIB

_CONTROL_GROUP = Path("/sys/fs/cgroup")

_BLOCK_SLABS = 16
"""Slabs cut from one allocation: few allocations, and little that is never used."""

_LAZY_BYTES_MAX = 512 * MIB


class Arena:
    """Equal slabs up to a budget; who finds none free waits for one to come back."""

    def __init__(self, slab_bytes: int, bytes_max: int | None, clock: Clock, *, lazy: bool = False) -> None:
        """Allocate nothing yet.

        Args:
            slab_bytes: Bytes of one slab, a multiple of a page.
            bytes_max: The budget; None for half of the memory that is free when it is first asked for.
            clock: Measures waits.
            lazy: Whether slabs are written while others are filled, so that without a budget few will do.
        """
        self.slab_bytes = slab_bytes
        self.waited_seconds = 0.0
        """How long slabs have been waited for so far."""
        self._bytes_max, self._clock, self._lazy = bytes_max, clock, lazy
        # Reentrant: a signal handler may save while this thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._free: list[memoryview] = []
        self._made = 0

    def holds(self, count: int) -> bool:
        """Return whether so many slabs fit the budget, those in use included, and it is of any use at all."""
        return max(count, 1) * self.slab_bytes <= self._budget()

    def take(self, given_up: Callable[[], bool]) -> memoryview | None:
        """Return a slab, waiting for one to come back if need be; None once its user has given up.

        Args:
            given_up: Asked before a wait, and after it whenever something changed or `wake` was called.
        """
        budget = self._budget()
        with self._changed:
            while not self._free and not self._grow(budget):
                if given_up():
                    return None
                start = self._clock.monotonic_seconds()
                self._changed.wait()
                self.waited_seconds += self._clock.monotonic_seconds() - start
            # The slab used a moment ago is the one still in the processor's cache.
            return self._free.pop()

    def give(self, slab: memoryview) -> None:
        """Put a slab back."""
        with self._changed:
            self._free.append(slab)
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

    def _budget(self) -> int:
        with self._changed:
            if self._bytes_max is None:
                self._bytes_max = free_memory_bytes() // 2 // ranks_on_host()
                if self._lazy:
                    self._bytes_max = min(self._bytes_max, _LAZY_BYTES_MAX)
            return self._bytes_max

    def _grow(self, budget: int) -> bool:
        count = min(_BLOCK_SLABS, budget // self.slab_bytes - self._made)
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
    limit, used = _first_number(_CONTROL_GROUP / "memory.max"), _first_number(_CONTROL_GROUP / "memory.current")
    if limit is None or used is None:
        return free
    # The group's page cache counts as used, and is given up when memory is asked for.
    cached = [
        _first_number(_CONTROL_GROUP / "memory.stat", after=f"\n{kind}_file ") or 0 for kind in ("active", "inactive")
    ]
    return max(min(free, limit - used + sum(cached)), 0)


def _first_number(path: Path, after: str = "") -> int | None:
    """Return the number that follows a word in a file of the kernel, or None if there is none."""
    try:
        words = path.read_text().partition(after)[2].split() if after else path.read_text().split()
    except OSError:
        return None
    return int(words[0]) if words and words[0].isdigit() else None
