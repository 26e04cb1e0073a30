"""One save's packs on their way through an arena: copied by one thread, hashed and written by another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from holdfast.engine.arena import Arena
from holdfast.engine.stream import stream
from holdfast.ports.framework import Source
from holdfast.spec.plan import PlannedPack


class Staging:
    """Windows in file order, filled from the state and taken by whoever writes them.

    One thread copies, as far ahead of the writer as the arena has slabs. Whoever gives up ends both sides: nothing
    more is copied, and every slab goes back.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # Reentrant: a signal handler may save, and give up, while this thread is in here.
        self._lock = threading.RLock()
        self._filled: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._over = threading.Event()

    def copy(
        self,
        packs: Sequence[PlannedPack],
        sources: Sequence[Source],
        chunk_bytes: int,
        on_copied: Callable[[], None],
    ) -> None:
        """Copy packs, each from the start of a window on; never raises, the writer hears of it.

        Args:
            packs: What to copy, in the order in which it will be written.
            sources: Bytes by shard number.
            chunk_bytes: As for writing.
            on_copied: Called once all is copied and before `wait` returns; what it raises fails the save.
        """
        try:
            for pack in packs:
                windows = _Filled(self._empty, self._put, self._arena.slab_bytes)
                try:
                    stream(pack.header, pack.plan, windows, chunk_bytes, sources, digesting=False)
                finally:
                    windows.close()
            on_copied()
        except BaseException as error:  # noqa: BLE001 - the thread that writes raises it
            self.give_up(error)
        finally:
            self._over.set()

    def take(self) -> memoryview:
        """Return the next filled window, waiting for it.

        Raises:
            BaseException: What copying failed with.
        """
        slab = self._filled.get()
        if slab is None:
            self._filled.put(None)
            self.raise_failure()
        assert slab is not None, "an end without a failure is never queued"
        return slab

    def give(self, slab: memoryview) -> None:
        """Give a window back that is written."""
        self._arena.give(slab)

    def give_up(self, error: BaseException) -> None:
        """End both sides for an error; the first one stands."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            while True:
                try:
                    slab = self._filled.get_nowait()
                except queue.Empty:
                    break
                if slab is not None:
                    self._arena.give(slab)
            self._filled.put(None)
        self._arena.wake()

    def wait(self) -> None:
        """Return once nothing more is read from the state."""
        self._over.wait()

    def raise_failure(self) -> None:
        """Raise what either side gave up for."""
        if self._failure is not None:
            raise self._failure

    def _empty(self) -> memoryview:
        slab = self._arena.take(given_up=lambda: self._failure is not None)
        if slab is None:
            self.raise_failure()
        assert slab is not None, "the arena gives nothing only to who has given up"
        return slab

    def _put(self, slab: memoryview) -> None:
        with self._lock:
            if self._failure is None:
                self._filled.put(slab)
                return
        self._arena.give(slab)
        self.raise_failure()


class _Filled:
    """The windows of one pack, each passed on as soon as it is full."""

    def __init__(self, take: Callable[[], memoryview], put: Callable[[memoryview], None], slab_bytes: int) -> None:
        self._take, self._put, self._slab_bytes = take, put, slab_bytes
        self._slab: memoryview | None = None
        self._filled = 0

    def room(self) -> memoryview:
        if self._slab is None:
            self._slab, self._filled = self._take(), 0
        return self._slab[self._filled :]

    def advance(self, count: int) -> None:
        self._filled += count
        if self._filled == self._slab_bytes:
            self.close()

    def close(self) -> None:
        """Pass on what is begun."""
        slab, self._slab = self._slab, None
        if slab is not None:
            self._put(slab)
