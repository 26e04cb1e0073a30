"""The key-value store of a job over the store of torch.distributed, on connections of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistStoreError

from holdfast.backends.torch.connection_pool import ConnectionPool, limit
from holdfast.backends.torch.private_layout import Store
from holdfast.base.clock import SystemClock
from holdfast.errors import UnavailableError

T = TypeVar("T")

_CALL_SECONDS = 60.0
"""Limit of a call that waits for no other rank and has no limit of its own."""


class TorchKeyValueStore:
    """A c10d store over connections that are used by one call at a time.

    A call that fails is repeated once on a new connection, except `add`: the network may have dropped the old one.
    `compare_set` may be repeated, because every caller takes the value that it returns as the decision.
    """

    def __init__(self, store: Store) -> None:
        self._connections = ConnectionPool(store)
        self._clock = SystemClock()

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key; idempotent."""
        # c10d takes bytes, the stub says text.
        self._call("set", key, timeout_seconds, lambda store, _: store.set(key, value))  # type: ignore[arg-type]

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys in one call once every one of them is set."""

        def get(store: Store, seconds: timedelta) -> list[bytes]:
            if store.has_extended_api():  # type: ignore[attr-defined]
                # It waits for all keys first, as `wait` does.
                return [bytes(value) for value in store.multi_get(list(keys))]
            store.wait(list(keys), seconds)
            return [bytes(store.get(key)) for key in keys]

        return self._call("get", keys[0], timeout_seconds, get) if keys else []

    def present(self, *keys: str) -> bool:
        """Return whether all keys are set, without waiting."""
        return self._call("check", keys[0], _CALL_SECONDS, lambda store, _: bool(store.check(list(keys))))

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """Add to a counter that starts at 0 and return its new value. Never retried."""
        return self._call("add", key, timeout_seconds, lambda store, _: int(store.add(key, amount)), repeatable=False)

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """Set `key` to `desired` if it is `expected` (empty: if it is not set); return its value afterwards."""

        def compare_set(store: Store, _: timedelta) -> bytes:
            # c10d takes str here, so callers pass ASCII.
            return bytes(store.compare_set(key, expected.decode("ascii"), desired.decode("ascii")))

        return self._call("compare_set", key, timeout_seconds, compare_set)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return once every key is set."""
        if keys:
            self._call("wait", keys[0], timeout_seconds, lambda store, seconds: store.wait(list(keys), seconds))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys; absent ones are no error."""
        for key in keys:
            self._call("delete", key, _CALL_SECONDS, lambda store, _, key=key: store.delete_key(key))  # type: ignore[misc]

    def _call(
        self,
        verb: str,
        key: str,
        timeout_seconds: float,
        request: Callable[[Store, timedelta], T],
        *,
        repeatable: bool = True,
    ) -> T:
        """Return the reply to a request, and translate errors of c10d.

        Args:
            verb, key: What is asked, for messages.
            timeout_seconds: Limit of the call.
            request: Asks, given a connection and the time that is left.
            repeatable: Whether the request may be sent again over a new connection.
        """
        start = self._clock.monotonic_seconds()
        can_repeat = True
        while True:
            connection = self._connections.take(timeout_seconds)
            is_new, has_asked = connection.store is None, False
            try:
                store = self._connections.opened(connection, timeout_seconds)
                has_asked = True
                reply = request(store, limit(store, start + timeout_seconds - self._clock.monotonic_seconds()))
            except RuntimeError as error:
                # The traceback refers to the connection, which would stay open while the next one is opened.
                error.__traceback__ = store = None
                # A host that cannot be reached has not kept this call waiting, however long c10d tried.
                is_gone = is_new and not has_asked
                if not is_gone and self._clock.monotonic_seconds() - start >= 0.9 * timeout_seconds:
                    # After a wait that runs out c10d has cancelled it with the host: the connection works.
                    is_cancelled = has_asked and isinstance(error, DistStoreError)
                    (self._connections.give_back if is_cancelled else self._connections.drop)(connection)
                    raise TimeoutError(f"{verb} {key}: no answer within {timeout_seconds:.1f} s") from error
                # The connection may hold half a reply.
                self._connections.drop(connection)
                self._connections.drop_free()
                if can_repeat and (repeatable if has_asked else not is_gone):
                    can_repeat = False
                    continue
                raise UnavailableError(
                    f"the job's key-value store failed at {verb} {key} ({error}). The next call opens a new "
                    "connection. If that fails too, the rank or agent that hosts the store is gone: restart the job"
                ) from error
            except BaseException:
                self._connections.drop(connection)
                raise
            self._connections.give_back(connection)
            return reply
