"""The comm of a process that saves or loads alone, and a key-value store inside the process; needs no framework."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from holdfast.base.interrupts import GUARD
from holdfast.errors import first_three


class InProcessKeyValueStore:
    """A key-value store that all threads of this process share."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition(GUARD)

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key; idempotent."""
        with GUARD:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys once every key is set."""
        with GUARD:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_seconds):
                absent = [key for key in keys if key not in self._values]
                raise TimeoutError(f"{first_three(absent)} not set within {timeout_seconds:.1f} s")
            return [self._values[key] for key in keys]

    def present(self, *keys: str) -> bool:
        """Return whether all keys are set, without a wait."""
        with GUARD:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """Add to a counter that starts at 0 and return the new value."""
        with GUARD:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """Set `key` to `desired` if the value is `expected` (empty: if not set); return the value after that."""
        # The store of a real job accepts ASCII text only here, so this one does too: tests then find callers that break
        # the rule.
        expected.decode("ascii")
        desired.decode("ascii")
        with GUARD:
            if self._values.get(key, b"") == expected:
                self._values[key] = bytes(desired)
                self._changed.notify_all()
            return self._values.get(key, b"")

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return once every key is set."""
        self.get_many(keys, timeout_seconds)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; absent ones are no error."""
        with GUARD:
            for key in keys:
                self._values.pop(key, None)

    def keys(self) -> list[str]:
        """Return every key that is set, sorted."""
        with GUARD:
            return sorted(self._values)


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
