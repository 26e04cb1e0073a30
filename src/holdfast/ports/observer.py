"""The observer: receives events about saves and loads, and the progress of long operations."""

from __future__ import annotations

from typing import Protocol

from holdfast.types.events import Event


class Observer(Protocol):
    """Receives events.

    A `CheckpointManager` calls each observer on a thread of its own, so a slow or raising observer affects neither
    saves nor loads. Imports, exports, comparisons and verifications call the observer on the working thread: there it
    must return quickly and must not raise.
    """

    def on_event(self, event: Event) -> None:
        """Take an event; ignore unknown kinds."""
        ...
