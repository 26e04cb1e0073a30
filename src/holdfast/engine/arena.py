"""Memory that staged saves borrow: allocated once, reused by every save after, never more than a budget."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.engine.host import ranks_on_host
from holdfast.engine.slabs import new_slab
from holdfast.ports.clock import Clock

_CONTROL_GROUP = Path("/sys/fs/cgroup")

_BLOCK_SLABS = 16
"""Slabs cut from one allocation: few allocations, and little that is never used."""


class Arena:
    """Equal slabs up to a budget; a save that finds too few waits for earlier ones to give theirs back."""

    def __init__(self, slab_bytes: int, bytes_max: int | None, clock: Clock) -> None:
        """Allocate nothing yet.

        Args:
            slab_bytes: Bytes of one slab, a multiple of a page.
            bytes_max: The budget; None for half of the memory that is free when the first save asks.
            clock: Measures waits.
        """
        self.slab_bytes = slab_bytes
        self.waited_seconds = 0.0
        """How long saves have waited for slabs so far."""
        self._bytes_max, self._clock = bytes_max, clock
        # Reentrant: a signal handler may save while this thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._free: list[memoryview] = []
        self._made = 0
        self._is_lending = False

    @contextmanager
    def lent(self, count: int) -> Iterator[deque[memoryview] | None]:
        """Lend slabs to be filled within a block; those left then go back, the others once they are given.

        All of them at once, and to one save at a time: what is lent and filled belongs to the background and will
        come back, but what another thread, or the code a signal handler has interrupted, is still filling may be
        waiting for us. Gives None then, and where the budget is too small.
        """
        with self._changed:
            if self._bytes_max is None:
                self._bytes_max = free_memory_bytes() // 2 // ranks_on_host()
            fits = count * self.slab_bytes <= self._bytes_max and self._bytes_max > 0
            lends = fits and not self._is_lending
            self._is_lending |= lends
        if not lends:
            yield None
            return
        slabs: deque[memoryview] = deque()
        try:
            self._fill(slabs, count)
            yield slabs
        finally:
            with self._changed:
                self._is_lending = False
                self._free += slabs
                self._changed.notify_all()

    def give(self, slab: memoryview) -> None:
        """Put a slab back."""
        with self._changed:
            self._free.append(slab)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of the memory that nobody uses."""
        with self._changed:
            self._made -= len(self._free)
            self._free.clear()

    def _fill(self, slabs: deque[memoryview], count: int) -> None:
        with self._changed:
            while len(self._free) < count:
                if not self._grow():
                    start = self._clock.monotonic_seconds()
                    self._changed.wait()
                    self.waited_seconds += self._clock.monotonic_seconds() - start
            # The slab used a moment ago is the one still in the processor's cache.
            slabs.extend(self._free.pop() for _ in range(count))

    def _grow(self) -> bool:
        assert self._bytes_max is not None, "set before anything is lent"
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
