"""The `Comm` of a process that saves or loads alone; needs no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.base.ports.in_process import InProcessKeyValueStore


class AloneComm:
    """The only rank of a job."""

    rank = 0
    world_size = 1
    group_id = "alone"
    timeout_seconds = None

    def __init__(self) -> None:
        self.key_value_store = InProcessKeyValueStore()
        """A key-value store inside this process."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return the payload."""
        return payload or b""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload alone."""
        return [payload]

    def bitwise_or(self, payload: bytes) -> bytes:
        """Return the payload."""
        return payload

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        """Do nothing: there is no other rank."""
