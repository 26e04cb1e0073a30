"""Stages one save: one thread copies its packs into buffers of the arena, another hashes and writes them.

A window passes through these states; the thread that makes each step is in brackets.

    empty -> filling (copier: `_empty`) -> queued (copier: `_put`; a device may still copy into it)
    queued -> whole (writer: `take` waits for the device) -> written -> back in the arena (writer: `give`)
    queued -> back in the arena (whichever side calls `give_up`, once the device is done)
    queued -> quarantined (whichever side waits for the device, if the wait fails)
"""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from holdfast.base.interrupts import Latch
from holdfast.base.ports.framework import Source, Ticket
from holdfast.base.types.plan import PlannedPack
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.buffers import QUARANTINED
from holdfast.core.engine.rooms import PackRooms
from holdfast.core.engine.stream import fill
from holdfast.errors import UnavailableError


class Staging:
    """A queue of windows in file order, between the thread that copies the state and the thread that writes.

    The copying thread runs ahead of the writer as far as the arena has buffers. It only enqueues device copies and
    passes their windows on at once; the writer waits until a window is whole. If either side gives up, both end:
    nothing more is copied, and each buffer returns to the arena once no copy into it is under way. If that wait fails,
    a device may still copy into the buffer, so it is quarantined.
    """

    def __init__(
        self,
        arena: Arena,
        bytes_max: int | None = None,
        explain: Callable[[Exception], Exception] = lambda error: error,
        rooms: PackRooms | None = None,
    ) -> None:
        """Begin with nothing copied.

        Args:
            arena: Where the buffers come from.
            bytes_max: Size to which the arena may grow for this save; None: its whole budget.
            explain: Returns the cause of an error of a copy, on the copying thread.
            rooms: Memory of the store, in place of buffers of the arena; None: the store lends none.
        """
        self.rooms = rooms
        """Memory of the store, in place of buffers of the arena."""
        self._arena, self._bytes_max, self._explain = arena, bytes_max, explain
        # Without a lock: a signal handler may save while the training thread gives up.
        self._filled: queue.SimpleQueue[_Window | None] = queue.SimpleQueue()
        self._under_way: list[_Window] = []
        self._failures: list[BaseException] = []
        self._over = Latch()
        self._retired_before = arena.retired
        self.unsure: Exception | None = None
        """The error of a wait for copies that may still read the state; valid once `wait` has returned True."""

    def copy(self, packs: Sequence[PlannedPack], sources: Sequence[Source]) -> None:
        """Copy packs, each from the start of a window on. Never raises: the writing thread raises the error.

        Args:
            packs: What to copy, in the order of the writes.
            sources: Where the bytes come from, by shard number.
        """
        try:
            for pack in packs:
                windows = _StagedWindows(partial(self._window, pack), self._put, self._arena.buffer_bytes)
                try:
                    fill(pack.header, pack.plan, windows, sources)
                finally:
                    windows.close()
            self._await_copies()
        except BaseException as error:  # noqa: BLE001 - the thread that writes raises it
            # The state must stay alive until no device reads it.
            self._await_copies()
            # The frames in the traceback hold the state for as long as the error lives. Clearing them skips this frame,
            # which still runs, so its own reference is dropped by hand.
            traceback.clear_frames(error.__traceback__)
            sources = ()
            if not isinstance(error, _GivenUp):  # `_GivenUp`: the writer gave up and has the reason.
                self.give_up(self._explain(error) if isinstance(error, Exception) else error)
        finally:
            self.end()

    def take(self) -> memoryview:
        """Return the next filled window, waiting for it.

        Raises:
            BaseException: The copy failed with this error.
        """
        window = self._filled.get()
        if window is None:
            self._filled.put(None)
            self.raise_failure()
        assert window is not None, "an end without a failure is never queued"
        self._require_whole(window)
        return window.buffer

    def may_be_kept(self, pack_bytes: int) -> bool:
        """Return whether a store may keep the windows of a pack until it is complete: the arena holds all of them."""
        return self.holds(-(-pack_bytes // self._arena.buffer_bytes))

    @property
    def window_bytes(self) -> int:
        """Bytes of a window."""
        return self._arena.buffer_bytes

    def holds(self, count: int) -> bool:
        """Return whether the arena has room for this many windows of the save."""
        return self._arena.holds(count, self._bytes_max)

    def give(self, buffer: memoryview) -> None:
        """Return the buffer of a written window to the arena."""
        self._arena.give(buffer)

    def give_up(self, error: BaseException) -> None:
        """End both sides because of an error; the first error is kept."""
        self._note_failure(error)
        self._drain()
        self._arena.wake()

    def _note_failure(self, error: BaseException) -> None:
        if not self._failures:  # The frames of a later one would keep the state alive.
            self._failures.append(error)

    def _drain(self) -> None:
        """Return every queued window. Either side may: the copier looks for a failure after it has queued a window."""
        with suppress(queue.Empty):
            while True:
                window = self._filled.get_nowait()
                if window is not None:
                    self._give_back(window)
        self._filled.put(None)

    def end(self) -> None:
        """Note that nothing reads the state any more, unless `unsure` is set."""
        self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing reads the state any more; return False if that took longer than `timeout` seconds."""
        return self._over.wait(timeout)

    def raise_failure(self) -> None:
        """Raise the error that either side gave up for, if one did."""
        if self._failures:
            raise self._failures[0]

    def _window(self, pack: PlannedPack, offset: int) -> _Window:
        room = None if self.rooms is None else self.rooms.room(pack, offset, self._arena.buffer_bytes)
        return _Window(self._empty()) if room is None else _Window(room, is_room=True)

    def _empty(self) -> memoryview:
        buffer = self._arena.take(self._wait_is_futile, self._bytes_max)
        if buffer is not None:
            return buffer
        if self._failures:
            raise _GivenUp
        raise UnavailableError(
            "the arena lost a buffer because waiting for a device failed; expected as many buffers as when this save "
            "began. Save again"
        )

    def _wait_is_futile(self) -> bool:
        return bool(self._failures) or self._arena.retired > self._retired_before

    def _put(self, window: _Window) -> None:
        if window.tickets:
            self._under_way.append(window)
        self._filled.put(window)
        if self._failures:
            self._drain()
            raise _GivenUp

    def _give_back(self, window: _Window) -> None:
        """Return the buffer of a window that will not be written, once no copy into it is under way."""
        try:
            self._require_whole(window)
        except Exception:  # noqa: BLE001 - the first error is kept
            return
        if not window.is_room:
            self._arena.give(window.buffer)

    def _require_whole(self, window: _Window) -> None:
        """Wait until a window is whole. If the wait fails, quarantine the buffer: a device may still copy into it."""
        try:
            window.wait()
        except BaseException as error:
            self._note_failure(error)
            if window.is_room:
                QUARANTINED.append(window.buffer)
            else:
                self._arena.quarantine_buffer(window.buffer)
            raise

    def _await_copies(self) -> None:
        """Wait until every enqueued copy is complete, or its wait has failed."""
        for window in self._under_way:
            try:
                window.wait()
            except Exception as error:  # noqa: BLE001 - the thread that writes raises it
                self.unsure = error
                self.give_up(error)
        self._under_way.clear()


class _GivenUp(Exception):
    """Stops the copying thread after the writer has given up."""


class _Window:
    """A buffer of the arena, or memory of the store, and tickets of the copies into it that may be under way."""

    def __init__(self, buffer: memoryview, *, is_room: bool = False) -> None:
        self.buffer, self.is_room = buffer, is_room
        self.tickets: list[Ticket] = []

    def wait(self) -> None:
        """Wait until the buffer is whole; any thread, any number of times. A failed wait does not end the others."""
        with ExitStack() as waits:
            for ticket in self.tickets:
                waits.callback(ticket.wait)
        self.tickets = []


class _StagedWindows:
    """The windows of one pack. Each is passed on once all of its bytes are copied, or their copies enqueued."""

    def __init__(self, take: Callable[[int], _Window], put: Callable[[_Window], None], buffer_bytes: int) -> None:
        self._take, self._put, self._buffer_bytes = take, put, buffer_bytes
        self._window: _Window | None = None
        self._offset = self._filled = 0

    def room(self) -> memoryview:
        return self._current().buffer[self._filled :]

    def await_copy(self, ticket: Ticket) -> None:
        self._current().tickets.append(ticket)

    def advance(self, count: int) -> None:
        self._filled += count
        if self._filled == self._buffer_bytes:
            self.close()

    def close(self) -> None:
        """Pass on the last window, if it holds anything."""
        window, self._window = self._window, None
        if window is not None:
            self._offset += self._filled
            self._put(window)

    def _current(self) -> _Window:
        if self._window is None:
            self._window, self._filled = self._take(self._offset), 0
        return self._window
