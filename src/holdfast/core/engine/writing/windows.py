"""The windows of one pack on their way to the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from holdfast.base.ports.codec import StoredPart
from holdfast.base.ports.readable import Release
from holdfast.base.ports.store import Upload
from holdfast.core.engine.buffers import BufferPool, allocate_aligned, copy_part
from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.encoding.probe import PackProbe
from holdfast.core.engine.parallel_map import WorkerThreads
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.writing.completions import in_flight
from holdfast.settings import Settings


class WrittenWindows:
    """The windows of one pack. Other threads write each one once it is full, and then return its buffer.

    A window that is still to be filled is memory of the store, if the store has some. A staged one is a buffer of the
    arena, which the store may keep until the pack is complete if the arena holds as many.

    The data of a coded pack begins behind a header that is made last. So the window in which it begins, the front, is
    kept until then; nothing is written of the windows before it.
    """

    def __init__(
        self,
        upload: Upload,
        pack_bytes: int,
        buffers: BufferPool | Staging,
        settings: Settings,
        written: Callable[[int], None] | None,
        data_start: int = 0,
        meter: SaveMeter | None = None,
        probe: PackProbe | None = None,
    ) -> None:
        """Begin at the start of the pack, or at the start of its data if its header is written last."""
        self._meter, self._probe = meter, probe
        self._upload, self._pack_bytes, self._buffers, self._written = upload, pack_bytes, buffers, written
        self._is_staged = isinstance(buffers, Staging)
        has_rooms = not isinstance(buffers, Staging) or buffers.rooms is not None
        self._asks_for_rooms = has_rooms
        """Whether the windows may be memory of the store."""
        self._may_be_kept = not has_rooms and isinstance(buffers, Staging) and buffers.may_be_kept(pack_bytes)
        self._is_room = False
        """Whether the current window is memory of the store."""
        self._window_bytes = settings._tuning.window_bytes
        self._threads = WorkerThreads(settings._tuning.windows_in_flight, "holdfast-write")
        self._failures: list[BaseException] = []
        self._given_up = False
        self._buffer: memoryview | None = None
        self._skipped = data_start % self._window_bytes
        """Bytes of the header in the front, until that is begun; then 0."""
        self._offset, self._filled = data_start - self._skipped, self._skipped
        self._front: tuple[int, memoryview, int] | None = None
        """Offset, memory and filled bytes of the front, once it is full."""

    def __enter__(self) -> WrittenWindows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up |= kind is not None
        self._threads.join()
        if self._buffer is not None and not self._is_room:
            self._buffers.give(self._buffer)

    def room(self) -> memoryview:
        """Return the rest of the current window."""
        if self._buffer is None:
            # One failed window fails the pack, so copying more would be wasted.
            self._raise_failure()
            self._buffer, self._filled = self._next_window(), self._skipped
        return self._buffer[self._filled : self._window_bytes]

    def _next_window(self) -> memoryview:
        count = min(self._window_bytes, self._pack_bytes - self._offset)
        room = self._upload.room(self._offset, count) if count and self._asks_for_rooms else None
        self._is_room = room is not None
        if self._is_staged:
            return self._buffers.take()  # The room, if there is one: the copy has filled it.
        if room is None and self._skipped:
            # Not from the pool: packs that keep a buffer each while they wait for another would wait for ever.
            self._is_room, room = True, allocate_aligned(self._window_bytes)
        return self._buffers.take() if room is None else room

    def append(self, parts: Sequence[StoredPart]) -> None:
        """Copy stored bytes to the windows."""
        for part in parts:
            at = 0
            while at < len(part):
                room = self.room()[: len(part) - at]
                copy_part(part, at, room)
                self.advance(len(room))
                at += len(room)

    def advance(self, count: int) -> None:
        """Go on behind the first bytes of `room`; a full window is written."""
        self._filled += count
        if self._filled == self._window_bytes:
            self._begin_write()

    def close(self) -> None:
        """Write the last window and wait for every write."""
        if self._filled:
            self._begin_write()
        self._threads.join()
        self._raise_failure()

    def close_behind(self, header: bytes) -> None:
        """Write the last window, then the header and the front; wait for every write."""
        if self._skipped:
            self.room()  # All data is in the front, or there is none.
        if self._filled:
            self._begin_write()
        stop = len(header) // self._window_bytes * self._window_bytes
        if self._front is not None:
            offset, buffer, count = self._front
            buffer[: len(header) - stop] = header[stop:]
            self._threads.begin(lambda: self._write(offset, buffer[:count], _keep))
        for start in range(0, stop, self._window_bytes):
            self._offset = start
            window = self._next_window()
            window[: self._window_bytes] = header[start : start + self._window_bytes]
            self._buffer, self._filled = window, self._window_bytes
            self._begin_write()
        self._threads.join()
        self._raise_failure()

    def _begin_write(self) -> None:
        assert self._buffer is not None
        buffer, count, offset = self._buffer, self._filled, self._offset
        if self._skipped:
            self._front = offset, buffer, count
            self._buffer, self._filled, self._offset, self._skipped = None, 0, offset + count, 0
            return
        give_back = _keep if self._is_room else partial(self._buffers.give, buffer)
        self._buffer, self._filled, self._offset = None, 0, offset + count
        self._threads.begin(lambda: self._write(offset, buffer[:count], give_back))

    def _write(self, offset: int, data: memoryview, give_back: Release) -> None:
        """Write a window, unless the pack has failed. Return its buffer in any case."""
        is_returned = False
        try:
            if self._given_up or self._failures:
                return
            if self._probe is not None:
                self._probe.look(offset, data)
            # The store returns what it may keep.
            is_returned = self._may_be_kept
            with in_flight(self._meter, len(data)):
                self._upload.write(offset, data, give_back if self._may_be_kept else None)
            if self._written is not None:
                self._written(len(data))
        except BaseException as error:  # noqa: BLE001 - `room` and `close` raise it on the thread that copies
            self._failures.append(error)
        finally:
            if not is_returned:
                give_back()

    def _raise_failure(self) -> None:
        """Raise the error of the first window that failed."""
        if self._failures:
            raise self._failures[0]


def _keep() -> None:
    """Return nothing: the window is memory of the store."""
