"""Who wants to know what goes on: how far a long piece of work has come, what saves and loads do."""

from __future__ import annotations

from typing import Protocol

from holdfast.types.events import Event


class Observer(Protocol):
    """Told of events.

    A `CheckpointManager` tells its observers on threads of theirs, so that one that is slow or raises hurts neither
    saving nor loading. Who is told of an import, an export, a comparison or a verification is told on the thread that
    works, and must return quickly and not raise.
    """

    def on_event(self, event: Event) -> None:
        """Hear of an event; kinds that are not known are to be passed over."""
        ...
