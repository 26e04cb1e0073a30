"""Communication of the ranks of one job: a key-value store for any thread, collectives for the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class KeyValueStore(Protocol):
    """The job's key-value store, over a connection of its own.

    Any thread may make any call. `timeout_seconds` limits a call; after that it raises the built-in `TimeoutError`. If
    the store cannot be reached, a call raises `UnavailableError`.
    """

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key; idempotent."""
        ...

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys in one call once every one of them is set."""
        ...

    def present(self, *keys: str) -> bool:
        """Return whether all keys are set, without waiting for them; one request."""
        ...

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """Add to a counter that starts at 0 and return its new value. Never retried."""
        ...

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """Set `key` to `desired` if it holds `expected` (empty: if it is not set); return its value after that.

        Values are ASCII text: `torch.distributed` stores accept nothing else here.
        """
        ...

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return once every key is set."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; absent ones are no error."""
        ...


class Comm(Protocol):
    """The ranks that save and load together."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def group_id(self) -> str:
        """Names the group among those that use the same key-value store; the same on all its ranks."""
        ...

    @property
    def key_value_store(self) -> KeyValueStore:
        """The key-value store of the group's job."""
        ...

    @property
    def timeout_seconds(self) -> float | None:
        """How long a collective of the training waits before it ends the training; None if that is not known."""
        ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's payload. A collective: every rank must call it, on the thread that called Holdfast."""
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank. A collective, as `broadcast`."""
        ...

    def bitwise_or(self, payload: bytes) -> bytes:
        """Return the bitwise OR of the payloads of all ranks, which have one length. A collective, as `broadcast`."""
        ...

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        """Send bytes to other ranks and receive theirs. A collective, as `broadcast`.

        Sizes are not transmitted: buffer by buffer, a sender's memory must be as long as the receiver's.

        Args:
            gives: Writable memory to send, by receiving rank, in order; several ranks may receive the same memory.
            takes: Writable memory to fill, by sending rank, in order.
        """
        ...
