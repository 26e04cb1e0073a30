"""The limits of all peers of an agent together."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.settings import MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all peers together; tests take smaller ones."""

    connections: int = 512
    """Most connections. Each has a thread, and memory for a header. One more takes the place of the proven one that
    waits longest for a request; is closed at once if none waits."""

    unproven: int = 64
    """Most connections without a proof; one more cuts off the oldest."""

    proving_seconds: float = 5.0
    """Longest time until the first proven request."""

    idle_seconds: float = 30.0
    """Longest wait for a byte, or for memory."""

    buffer_bytes: int = 64 * MIB
    """Memory of all headers, pieces, pages and tasks. Connections wait for that of pages and tasks."""


DEFAULT_LIMITS = Limits()
