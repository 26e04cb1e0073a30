"""The memory of objects on their way to a store: bounded, and the upload that fills it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from holdfast.errors import InvalidError
from holdfast.stores.parts import PartLedger


class BytesInFlight:
    """Bounds the memory of all uploads of one store in this process."""

    def __init__(self, bytes_max: int) -> None:
        """Begin with nothing in flight."""
        self._bytes_max = bytes_max
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


class ObjectUpload:
    """Collects an object in memory of its own, and stores it by one request in `complete`.

    A process that ends before that leaves nothing behind. The memory is never used for another object: the request of
    an upload that failed may still be reading it.
    """

    def __init__(self, ledger: PartLedger, in_flight: BytesInFlight, create: Callable[[memoryview], None]) -> None:
        """Take memory for the whole object; wait for other uploads if there is not enough."""
        self._ledger, self._in_flight, self._create = ledger, in_flight, create
        self._lock = threading.Lock()
        in_flight.take(ledger.total_bytes)
        try:
            self._memory = memoryview(mmap.mmap(-1, ledger.total_bytes) if ledger.total_bytes else b"")
        except BaseException:
            in_flight.give(ledger.total_bytes)
            raise
        self._is_closed = False

    def write(self, offset: int, data: memoryview) -> None:
        """Copy one part."""
        self._ledger.check(offset, data.nbytes)
        memory = self._memory_if_open()
        memory[offset : offset + data.nbytes] = data.cast("B")
        self._ledger.written.add(offset)

    def complete(self) -> None:
        """Store the object unless its key exists."""
        memory = self._memory_if_open()
        self._ledger.require_whole()
        self._create(memory)
        self._close()

    def abort(self) -> None:
        """Forget the object. Nothing of it was sent."""
        self._close()

    def _memory_if_open(self) -> memoryview:
        with self._lock:
            if self._is_closed:
                raise InvalidError(f"{self._ledger.where}: the upload was completed or aborted before")
            return self._memory

    def _close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._memory = True, memoryview(b"")
        self._in_flight.give(self._ledger.total_bytes)
