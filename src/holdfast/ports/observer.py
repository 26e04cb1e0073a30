"""The observer: receives events about saves and loads, and the progress of long operations."""

from __future__ import annotations

import threading
from typing import Protocol

from holdfast.types.events import Event, Progress


class Observer(Protocol):
    """Receives events.

    A `CheckpointManager` calls each observer on a thread of its own, so a slow or raising observer affects neither
    saves nor loads. Imports, exports, comparisons and verifications call the observer on the working thread: there it
    must return quickly and must not raise.
    """

    def on_event(self, event: Event) -> None:
        """Take an event; ignore unknown kinds."""
        ...


class ByteProgress:
    """Counts the bytes that a long operation has done, and reports each count. Any thread may call `add`."""

    def __init__(self, total_bytes: int, observer: Observer | None) -> None:
        """Report nothing yet.

        Args:
            total_bytes: Bytes of the whole operation.
            observer: Receives progress; None: only count.
        """
        self.total_bytes, self.done_bytes, self._observer = total_bytes, 0, observer
        # Held while reporting, so that the counts arrive in ascending order.
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count more bytes as done, and report the new sum."""
        with self._lock:
            self.done_bytes += count
            if self._observer is not None:
                self._observer.on_event(Progress(self.done_bytes, self.total_bytes))
