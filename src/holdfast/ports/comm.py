"""How the ranks of one job talk: a board of small keys for any thread, collectives for the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class KeyValueStore(Protocol):
    """The job's key-value store, seen through a connection of our own.

    Any thread may call. Every call takes the seconds it may last. A wait that runs out raises the built-in
    `TimeoutError`; a store that is gone raises `UnavailableError`.
    """

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key; idempotent."""
        ...

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys in one call once every one of them is set."""
        ...

    def present(self, key: str) -> bool:
        """Return whether a key is set, without waiting for it."""
        ...

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """Add to a counter that starts at 0 and return its new value. Never retried."""
        ...

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """Set `key` to `desired` if it holds `expected` (empty: if it is not set); return what it holds then."""
        ...

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return once every key is set."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Forget keys; absent ones are no error."""
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
    def key_value_store(self) -> KeyValueStore:
        """The key-value store of the group's job."""
        ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's payload on every rank. A collective: caller's thread only, every rank must call."""
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by rank. A collective: caller's thread only, every rank must call."""
        ...

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        """Give other ranks bytes and take theirs. A collective: caller's thread only, every rank must call.

        Nothing is said about sizes: what one rank gives another is, buffer by buffer, as long as what that one takes.

        Args:
            gives: Writable memory to send, by rank and in order; the same memory may go to several ranks.
            takes: Writable memory to fill, by the rank it comes from and in order.
        """
        ...
