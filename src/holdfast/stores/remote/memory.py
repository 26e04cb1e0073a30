"""The memory of objects on their way to a store: bounded, and the upload that fills it."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable

from holdfast.errors import InvalidError
from holdfast.stores.parts import PartLedger, RoomUpload


class BytesInFlight:
    """Bounds the memory of all uploads of one store in this process."""

    def __init__(self, bytes_max: int) -> None:
        """Begin with nothing in flight."""
        self._bytes_max = bytes_max
        self._reset()
        _BOUNDS.add(self)

    def _reset(self) -> None:
        """Begin anew: a forked child has none of the threads that would give memory back, or that hold the lock."""
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, count: int) -> None:
        """Wait until an object of this many bytes fits, or is alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + count <= self._bytes_max)
            self._taken += count

    def give(self, count: int) -> None:
        """Return what `take` took."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()


def new_memory(count: int) -> memoryview:
    """Return memory of its own for an object or a part. Pages that nobody touches take none."""
    return memoryview(mmap.mmap(-1, max(count, 1)))


_BOUNDS: weakref.WeakSet[BytesInFlight] = weakref.WeakSet()


def _forget_threads() -> None:
    for bound in list(_BOUNDS):
        bound._reset()


os.register_at_fork(after_in_child=_forget_threads)


class ObjectUpload(RoomUpload):
    """Collects an object in memory of its own, and stores it by one request in `complete`.

    A process that ends before that leaves nothing behind. The memory is never used for another object: the request of
    an upload that failed may still be reading it.
    """

    def __init__(self, ledger: PartLedger, in_flight: BytesInFlight, create: Callable[[memoryview], None]) -> None:
        """Begin an object. Its memory is taken with the first part, which may wait for other uploads."""
        super().__init__(ledger)
        self._in_flight, self._create = in_flight, create
        self._lock = threading.Lock()
        self._memory: memoryview | None = None
        self._is_closed = False

    def complete(self, total_bytes: int | None = None) -> None:
        """Store the object unless its key exists."""
        memory = self._open_memory()
        total = self._ledger.require_whole(total_bytes)
        self._create(memory[:total])
        self._close()

    def abort(self) -> None:
        """Forget the object. Nothing of it was sent, unless `complete` failed."""
        self._close()

    def _open_memory(self) -> memoryview:
        with self._lock:
            if self._is_closed:
                raise InvalidError(f"{self._ledger.where}: the upload was completed or aborted before")
            if self._memory is None:
                self._in_flight.take(self._ledger.bytes_max)
                try:
                    self._memory = new_memory(self._ledger.bytes_max)
                except BaseException:
                    self._in_flight.give(self._ledger.bytes_max)
                    raise
            return self._memory

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._memory is None:
                return
            self._memory = None
        self._in_flight.give(self._ledger.bytes_max)
