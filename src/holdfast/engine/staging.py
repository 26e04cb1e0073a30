"""One save's packs on their way through an arena: copied by one thread, hashed and written by another."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from holdfast.engine.arena import Arena
from holdfast.engine.stream import fill
from holdfast.errors import UnavailableError
from holdfast.ports.framework import Source, Ticket
from holdfast.types.plan import PlannedPack


class Staging:
    """Windows in file order, filled from the state and taken by whoever writes them.

    One thread copies, as far ahead of the writer as the arena has buffers. Copies that a device makes are only queued
    by it, and their windows passed on at once; whoever takes a window waits until it is whole. Whoever gives up ends
    both sides: nothing more is copied, and every buffer goes back once no copy into it is under way; where a wait fails
    nobody can tell, and the buffer is retired.
    """

    def __init__(self, arena: Arena, bytes_max: int | None = None) -> None:
        """Begin with nothing copied.

        Args:
            arena: Where buffers are from.
            bytes_max: What the arena may grow to for this, within its budget; None: to all of it.
        """
        self._arena, self._bytes_max = arena, bytes_max
        # Reentrant: a signal handler may save, and give up, while this thread is in here.
        self._lock = threading.RLock()
        self._filled: queue.SimpleQueue[_Window | None] = queue.SimpleQueue()
        self._under_way: list[_Window] = []
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._retired_before = arena.retired
        self.unsure: Exception | None = None
        """What waiting failed with for copies that may still read the state, once `wait` is through."""

    def copy(self, packs: Sequence[PlannedPack], sources: Sequence[Source]) -> None:
        """Copy packs, each from the start of a window on; never raises, the writer hears of it.

        Args:
            packs: What to copy, in the order in which it will be written.
            sources: Bytes by shard number.
        """
        try:
            for pack in packs:
                windows = _Filled(self._empty, self._put, self._arena.buffer_bytes)
                try:
                    fill(pack.header, pack.plan, windows, sources)
                finally:
                    windows.close()
            self._await_copies()
        except BaseException as error:  # noqa: BLE001 - the thread that writes raises it
            # What is being read must not be let go before.
            self._await_copies()
            # Frames that are done with hold the state for as long as somebody holds the error; this one goes on.
            traceback.clear_frames(error.__traceback__)
            sources = ()
            if not isinstance(error, _GivenUp):  # Then the thread that writes knows why.
                self.give_up(error)
        finally:
            self.end()

    def take(self) -> memoryview:
        """Return the next filled window, waiting for it.

        Raises:
            BaseException: What copying failed with.
        """
        window = self._filled.get()
        if window is None:
            self._filled.put(None)
            self.raise_failure()
        assert window is not None, "an end without a failure is never queued"
        self._require_whole(window)
        return window.buffer

    def give(self, buffer: memoryview) -> None:
        """Give a window back that is written."""
        self._arena.give(buffer)

    def give_up(self, error: BaseException) -> None:
        """End both sides for an error; the first one stands."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            while True:
                try:
                    window = self._filled.get_nowait()
                except queue.Empty:
                    break
                if window is not None:
                    self._give_back(window)
            self._filled.put(None)
        self._arena.wake()

    def end(self) -> None:
        """Note that nothing more will be read from the state, unless `unsure` says otherwise."""
        self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing more is read from the state; return whether that came in time."""
        return self._over.wait(timeout)

    def raise_failure(self) -> None:
        """Raise what either side gave up for."""
        if self._failure is not None:
            raise self._failure

    def _empty(self) -> memoryview:
        buffer = self._arena.take(self._waits_in_vain, self._bytes_max)
        if buffer is not None:
            return buffer
        if self._failure is not None:
            raise _GivenUp
        raise UnavailableError(
            "memory for copies of what is saved was lost to a device for which waiting failed; expected as much of it "
            "as when this save began. Save again"
        )

    def _waits_in_vain(self) -> bool:
        return self._failure is not None or self._arena.retired > self._retired_before

    def _put(self, window: _Window) -> None:
        if window.tickets:
            self._under_way.append(window)
        with self._lock:
            if self._failure is None:
                self._filled.put(window)
                return
        self._give_back(window)
        raise _GivenUp

    def _give_back(self, window: _Window) -> None:
        """Give back a window that nobody will write, once nothing is copied into it any more."""
        try:
            self._require_whole(window)
        except Exception:  # noqa: BLE001 - why it was given up stands
            return
        self._arena.give(window.buffer)

    def _require_whole(self, window: _Window) -> None:
        """Wait until a window is whole; one of which nobody can tell is given up, and its buffer retired."""
        try:
            window.wait()
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self._arena.quarantine_buffer(window.buffer)
            raise

    def _await_copies(self) -> None:
        """Wait until every copy that was queued is complete, or waiting for it has failed."""
        for window in self._under_way:
            try:
                window.wait()
            except Exception as error:  # noqa: BLE001 - the thread that writes raises it
                self.unsure = error
                self.give_up(error)
        self._under_way.clear()


class _GivenUp(Exception):
    """The other side has given up."""


class _Window:
    """A buffer, and the copies into it that may be under way."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.tickets: list[Ticket] = []

    def wait(self) -> None:
        """Wait until it is whole; any thread, any number of times. One copy's failure says nothing of another's."""
        with ExitStack() as waits:
            for ticket in self.tickets:
                waits.callback(ticket.wait)
        self.tickets = []


class _Filled:
    """The windows of one pack, each passed on as soon as all of it is copied or on its way."""

    def __init__(self, take: Callable[[], memoryview], put: Callable[[_Window], None], buffer_bytes: int) -> None:
        self._take, self._put, self._buffer_bytes = take, put, buffer_bytes
        self._window: _Window | None = None
        self._filled = 0

    def room(self) -> memoryview:
        return self._current().buffer[self._filled :]

    def await_copy(self, ticket: Ticket) -> None:
        self._current().tickets.append(ticket)

    def advance(self, count: int) -> None:
        self._filled += count
        if self._filled == self._buffer_bytes:
            self.close()

    def close(self) -> None:
        """Pass on what is begun."""
        window, self._window = self._window, None
        if window is not None:
            self._put(window)

    def _current(self) -> _Window:
        if self._window is None:
            self._window, self._filled = _Window(self._take()), 0
        return self._window
