"""The memory of objects on their way to a store: bounded, and the upload that fills it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.base.ports.parts import PartLedger, RoomUpload
from holdfast.base.ports.readable import Release
from holdfast.errors import InvalidError
from holdfast.settings import KIB, MIB, PAGE_BYTES

_WIPE_ON_FORK = 18
"""`MADV_WIPEONFORK`, which Python does not name: a forked child sees zeros instead of a copy of each page."""

_HUGE_PAGE_BYTES = 2 * MIB

_HEADER_BYTES = 64 * KIB
"""What the bound does not count of an object: so eight packs of 32 MiB fit 256 MiB with their headers."""


_SLACK_BYTES_MAX = MIB
"""How much larger than an object the memory may be that it gets: more would go beyond the bound."""


class BytesInFlight:
    """The memory of all uploads of one store in this process, and its bound.

    Memory whose request is over is used again by the next object: the first touch of a page costs more than a copy into
    it. Once no object is in flight, all of it is freed.
    """

    def __init__(self, bytes_max: int) -> None:
        """Begin with nothing in flight."""
        self._bytes_max = bytes_max
        self._reset()
        _BOUNDS.add(self)

    def _reset(self) -> None:
        """Begin anew: a forked child has none of the threads that would give memory back, or that hold the lock."""
        self._taken = 0
        self._free: list[memoryview] = []
        self._changed = threading.Condition()

    def take(self, count: int) -> memoryview:
        """Wait until an object of this many bytes fits, or is alone; return memory that holds it."""
        with self._changed:
            self.reserve(count)
            for number, memory in enumerate(self._free):
                if count <= memory.nbytes <= count + _SLACK_BYTES_MAX:
                    return self._free.pop(number)
            # What is free has another size, and must make room.
            while self._free and self._taken + sum(_counted(each.nbytes) for each in self._free) > self._bytes_max:
                self._free.pop()
        try:
            return _new_memory(count)
        except BaseException:
            self.give(count)
            raise

    def reserve(self, count: int) -> None:
        """Wait until an object of this many bytes fits, or is alone; it has memory of its own. `give` ends it."""
        counted = _counted(count)
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + counted <= self._bytes_max)
            self._taken += counted

    def give(self, count: int, free: memoryview | None = None) -> None:
        """Return what `take` took, or `reserve`.

        Args:
            count: As for `take` or `reserve`.
            free: Its memory, if nothing reads it any more.
        """
        with self._changed:
            self._taken -= _counted(count)
            if free is not None:
                self._free.append(free)
            if not self._taken:
                self._free.clear()
            self._changed.notify_all()


def _counted(count: int) -> int:
    return max(count - _HEADER_BYTES, 1)


def _new_memory(count: int) -> memoryview:
    """Return memory for an object: huge pages as far as it fills them, for one fault is less than 512.

    Pages that nothing touches take no memory. So the rest of an object is in ordinary pages.
    """
    length = -(-max(count, 1) // PAGE_BYTES) * PAGE_BYTES
    private = mmap.mmap(-1, length + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        private.madvise(_WIPE_ON_FORK)
    except OSError:
        return memoryview(mmap.mmap(-1, length))  # Linux before 4.14: memory shared by parent and child
    first = -ctypes.addressof(ctypes.c_char.from_buffer(private)) % _HUGE_PAGE_BYTES
    whole = length - length % _HUGE_PAGE_BYTES
    if whole:
        try:
            private.madvise(mmap.MADV_HUGEPAGE, first, whole)
        except OSError:
            pass  # The kernel has no huge pages.
    return memoryview(private)[first : first + length]


_BOUNDS: weakref.WeakSet[BytesInFlight] = weakref.WeakSet()


def _forget_threads() -> None:
    for bound in list(_BOUNDS):
        bound._reset()


os.register_at_fork(after_in_child=_forget_threads)


class ObjectUpload(RoomUpload):
    """Collects an object in memory, and stores it by one request in `complete`.

    A process that ends before that leaves nothing behind. The memory is used for another object only if this one was
    stored, and no earlier try still reads it. Otherwise it is not: a device may still copy into it, too.
    """

    def __init__(self, ledger: PartLedger, in_flight: BytesInFlight, create: Callable[[memoryview], None]) -> None:
        """Begin an object. Its memory is taken with the first part, which may wait for other uploads."""
        super().__init__(ledger)
        self._in_flight, self._create = in_flight, create
        self._lock = threading.Lock()
        self._memory: memoryview | None = None
        self._sent: list[_Sent] = []
        """The memory, once for each request: whoever reads it holds it until that request is over."""
        self._is_closed = False

    def complete(self, total_bytes: int | None = None) -> None:
        """Store the object unless its key exists."""
        memory = self._open_memory()
        total = self._ledger.require_whole(total_bytes)
        sent = _Sent(memory[:total])
        self._sent.append(sent)
        self._create(sent.data)
        self._close(is_free=all(each.is_released() for each in self._sent))

    def abort(self) -> None:
        """Forget the object. Nothing of it was sent, unless `complete` failed."""
        self._close(is_free=False)

    def _open_memory(self) -> memoryview:
        with self._lock:
            if self._is_closed:
                raise InvalidError(f"{self._ledger.where}: the upload was completed or aborted before")
            if self._memory is None:
                self._memory = self._in_flight.take(self._ledger.bytes_max)
            return self._memory

    def _close(self, *, is_free: bool) -> None:
        with self._lock:
            self._is_closed = True
            memory, self._memory = self._memory, None
        if memory is not None:
            self._in_flight.give(self._ledger.bytes_max, memory if is_free else None)


class LentObject:
    """An object in memory of its sender, stored by one request in `complete`. It takes its place in the bound."""

    def __init__(
        self,
        where: str,
        parts: Sequence[memoryview],
        in_flight: BytesInFlight,
        create: Callable[[Sequence[memoryview]], None],
    ) -> None:
        """Begin an object; this may wait for other uploads."""
        self._where, self._in_flight, self._create = where, in_flight, create
        self._parts: Sequence[memoryview] | None = parts
        self._lock = threading.Lock()
        self._bytes = sum(part.nbytes for part in parts)
        in_flight.reserve(self._bytes)

    def room(self, offset: int, length_bytes: int) -> None:
        """Return None: there are no parts to write."""

    def write(self, offset: int, data: memoryview, release: Release | None = None) -> None:
        """Refuse a part.

        Raises:
            InvalidError: Always.
        """
        if release is not None:
            release()
        raise InvalidError(f"upload of {self._where}: all of it is lent; expected no part to be written")

    def complete(self, total_bytes: int | None = None) -> None:
        """Store the object unless its key exists."""
        if self._parts is None:
            raise InvalidError(f"{self._where}: the upload was completed or aborted before")
        if total_bytes not in (None, self._bytes):
            raise InvalidError(f"upload of {self._where}: total_bytes={total_bytes}; {self._bytes} bytes are lent")
        self._create(self._parts)
        self.abort()

    def abort(self) -> None:
        """Forget the object. Nothing of it was sent, unless `complete` failed."""
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is not None:
            self._in_flight.give(self._bytes)


class _Sent:
    """Memory as one request gets it, which knows whether anybody holds it still.

    A view that was cut out of another one does not keep that one from its release. But all of them keep what they are
    views of: here an array of this request alone.
    """

    def __init__(self, memory: memoryview) -> None:
        array = np.frombuffer(memory, dtype=np.uint8)
        self.data = array.data
        self._array = weakref.ref(array)

    def is_released(self) -> bool:
        """Return whether nobody holds the memory any more. The request that still does not have it gets none."""
        try:
            self.data.release()
        except BufferError:
            return False
        return self._array() is None
