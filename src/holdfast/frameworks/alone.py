"""One process that saves or loads alone: there is nobody to talk to, and no framework is needed for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence


class OwnKeyValueStore:
    """A key-value store inside this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key; idempotent."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys in one call once every one of them is set."""
        with self._changed:
            self._wait(keys, timeout_seconds)
            return [self._values[key] for key in keys]

    def present(self, key: str) -> bool:
        """Return whether a key is set, without waiting for it."""
        with self._changed:
            return key in self._values

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """Add to a counter that starts at 0 and return its new value."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """Set `key` to `desired` if it holds `expected` (empty: if it is not set); return what it holds then."""
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._values[key] = bytes(desired)
                self._changed.notify_all()
            return self._values.get(key, b"")

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return once every key is set."""
        with self._changed:
            self._wait(keys, timeout_seconds)

    def delete(self, keys: Sequence[str]) -> None:
        """Forget keys; absent ones are no error."""
        with self._changed:
            for key in keys:
                self._values.pop(key, None)

    def _wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not all(key in self._values for key in keys):
            left = deadline - time.monotonic()
            if left <= 0:
                absent = [key for key in keys if key not in self._values]
                raise TimeoutError(f"{absent[:3]} not set within {timeout_seconds:.1f} s")
            self._changed.wait(left)


class AloneComm:
    """One process alone."""

    def __init__(self) -> None:
        self._key_value_store = OwnKeyValueStore()

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    @property
    def key_value_store(self) -> OwnKeyValueStore:
        """A key-value store inside this process."""
        return self._key_value_store

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return the payload."""
        return payload or b""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload alone."""
        return [payload]

    def exchange(self, gives: Mapping[int, Sequence[memoryview]], takes: Mapping[int, Sequence[memoryview]]) -> None:
        """Do nothing: there is nobody else."""
