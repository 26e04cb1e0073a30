"""Writes parts of one upload side by side."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from holdfast.base.ports.store import Upload
from holdfast.core.engine.parallel_map import WorkerThreads

_PARTS_AT_ONCE = 4
"""One connection alone does not fill the line to a store."""


class PartWrites:
    """The parts of one upload that are under way, out of memory that nobody changes. One thread calls."""

    def __init__(self, upload: Upload) -> None:
        """Start no thread yet."""
        self._upload, self._threads = upload, WorkerThreads(_PARTS_AT_ONCE, "holdfast-part")
        self._under_way: deque[Future[None]] = deque()

    def begin(self, start: int, data: memoryview) -> None:
        """Begin a part once fewer than the most are under way; raise the failure of an earlier one."""
        if len(self._under_way) == _PARTS_AT_ONCE:
            self._under_way.popleft().result()
        self._under_way.append(self._threads.submit(self._upload.write, start, data))

    def wait(self) -> None:
        """Return once all parts are written; raise the first failure."""
        while self._under_way:
            self._under_way.popleft().result()
        self.end()

    def end(self) -> None:
        """Wait for the requests under way, whatever becomes of them."""
        self._threads.join()
