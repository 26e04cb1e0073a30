"""The key-value store of a job over the store of torch.distributed, on connections of its own."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from holdfast.clock import SystemClock
from holdfast.errors import UnavailableError

T = TypeVar("T")

_PREFIX = "holdfast"

_CONNECT_SECONDS_MAX = 10.0
"""Longest attempt to reach the store's host; c10d takes up to twice the timeout that it is given."""

_CALL_SECONDS = 60.0
"""Limit of a call that waits for no other rank and has no limit of its own."""

_IDLE_SECONDS = 5.0
"""After this time without use a connection is tried out before the next call.

c10d's `set` reads no reply, so it reports success on a connection that the network has dropped. `add` must not be
repeated, so it needs a connection that works."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Options of TCP: after a minute without an answer from the host a connection counts as broken."""

_LIBC = ctypes.CDLL(None)

_ADDRESS_BYTES = 128
"""Size of the largest socket address, `sockaddr_storage`."""


class TorchKeyValueStore:
    """A c10d store over connections that are used by one call at a time.

    A blocking wait occupies its connection until it ends, so a call that finds no free connection opens one more.
    A call that fails is repeated once on a new connection, except `add`: the network may have dropped the old one.
    `compare_set` may be repeated, because every caller takes the value that it returns as the decision.
    """

    def __init__(self, store: Store) -> None:
        self._given = store  # The host process serves only while this object lives; clones do not keep it alive.
        inner = store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store  # type: ignore[attr-defined]
        self._host = (inner.host, inner.port) if isinstance(inner, TCPStore) else None
        # A deque, whose operations are atomic: a signal handler may call at any time. Newest last: few are in use.
        self._free: deque[tuple[float, Store]] = deque()
        self._clock = SystemClock()

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Set a key; idempotent."""
        # c10d takes bytes, the stub says text.
        self._call("set", key, timeout_seconds, lambda store, _: store.set(key, value))  # type: ignore[arg-type]

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """Return the values of all keys in one call once every one of them is set."""

        def get(store: Store, seconds: timedelta) -> list[bytes]:
            store.wait(list(keys), seconds)
            if store.has_extended_api():  # type: ignore[attr-defined]
                return [bytes(value) for value in store.multi_get(list(keys))]
            return [bytes(store.get(key)) for key in keys]

        return self._call("get", keys[0], timeout_seconds, get) if keys else []

    def present(self, key: str) -> bool:
        """Return whether a key is set, without waiting."""
        return self._call("check", key, _CALL_SECONDS, lambda store, _: bool(store.check([key])))

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
            has_asked = is_new = False
            try:
                is_new = not self._free
                store = self._connection(timeout_seconds)
                has_asked = True
                seconds = self._limit(store, start + timeout_seconds - self._clock.monotonic_seconds())
                reply = request(store, seconds)
            except RuntimeError as error:
                # A host that cannot be reached has not kept this call waiting, however long c10d tried.
                is_gone = is_new and not has_asked
                if not is_gone and self._clock.monotonic_seconds() - start >= 0.9 * timeout_seconds:
                    raise TimeoutError(f"{verb} {key}: no answer within {timeout_seconds:.1f} s") from error
                # The connection may hold half a reply, so it is dropped. What broke it may have broken the idle ones.
                self._free.clear()
                if can_repeat and (repeatable if has_asked else not is_gone):
                    can_repeat = False
                    continue
                raise UnavailableError(
                    f"the job's key-value store failed at {verb} {key} ({error}). The next call opens a new "
                    "connection. If that fails too, the rank or agent that hosts the store is gone: restart the job"
                ) from error
            self._free.append((self._clock.monotonic_seconds(), store))
            return reply

    def _connection(self, timeout_seconds: float) -> Store:
        """Return a connection that no other call uses.

        Raises:
            RuntimeError: The host cannot be reached, or the connection was dropped while it was idle.
        """
        connect_seconds = min(timeout_seconds / 3, _CONNECT_SECONDS_MAX)
        try:
            used, store = self._free.pop()
        except IndexError:
            return self._connect(timedelta(seconds=max(connect_seconds, 0.001)))
        if self._clock.monotonic_seconds() - used > _IDLE_SECONDS:
            self._limit(store, timeout_seconds)
            store.check([_PREFIX])
        return store

    def _connect(self, timeout: timedelta) -> Store:
        if self._host is None:
            return PrefixStore(_PREFIX, self._given.clone())  # type: ignore[attr-defined]
        # No clone: it inherits the timeout of the training's store, and tries that long if the host is gone.
        host, port = self._host
        store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        _keep_alive(port)
        return PrefixStore(_PREFIX, store)

    @staticmethod
    def _limit(store: Store, seconds: float) -> timedelta:
        """Limit the next call over a connection; return the limit."""
        limit = timedelta(seconds=max(seconds, 0.001))
        store.set_timeout(limit)
        return limit


def _keep_alive(port: int) -> None:
    """Turn on TCP keep-alive for this process's connections to a port. c10d offers neither that nor the sockets.

    A connection that is idle between two saves otherwise breaks without a word behind a firewall or a NAT.
    """
    with suppress(FileNotFoundError):  # A system without /proc.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            # Any thread may close the descriptor in between.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _peer_port(descriptor) == port:
                    _set_option(descriptor, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for name, value in _KEEP_ALIVE.items():
                        _set_option(descriptor, socket.IPPROTO_TCP, getattr(socket, name), value)


# Functions of the C library: a `socket.socket` over a descriptor makes it non-blocking if the training has called
# `socket.setdefaulttimeout`, and closes it if a signal handler raises meanwhile. Gloo and c10d own these descriptors.
def _peer_port(descriptor: int) -> int | None:
    """Return the TCP port that a socket is connected to; None if it is connected to none."""
    address, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    if _LIBC.getpeername(descriptor, address, ctypes.byref(length)):
        return None
    family, port = int.from_bytes(address.raw[:2], sys.byteorder), int.from_bytes(address.raw[2:4], "big")
    return port if family in (socket.AF_INET, socket.AF_INET6) else None


def _set_option(descriptor: int, level: int, option: int, value: int) -> None:
    _LIBC.setsockopt(descriptor, level, option, ctypes.byref(ctypes.c_int(value)), ctypes.sizeof(ctypes.c_int))
