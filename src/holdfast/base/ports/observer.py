"""The observer: receives events about saves and loads, and the progress of long operations."""

from __future__ import annotations

from typing import Protocol

from holdfast.base.types.events import Event, Progress


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
    """Counts the bytes that a long operation has processed, and reports the sum."""

    def __init__(self, total_bytes: int, observer: Observer | None) -> None:
        """Report nothing yet.

        Args:
            total_bytes: Bytes of the whole operation.
            observer: Receives progress; None: only count.
        """
        self.total_bytes, self._done_bytes, self._observer = total_bytes, 0, observer

    def add(self, count: int) -> None:
        """Count more bytes as done, and report the new sum. One thread at a time."""
        self._done_bytes += count
        if self._observer is not None:
            self._observer.on_event(Progress(self._done_bytes, self.total_bytes))
