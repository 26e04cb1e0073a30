"""The connections of a rank to the host of its key-value store: few, and each is used by one call at a time."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

from holdfast.backends.torch.private_layout import PrefixStore, Store, TCPStore, store_without_prefix
from holdfast.base.clock import SystemClock

_PREFIX = "holdfast"

_CONNECT_SECONDS_MAX = 10.0
"""Longest attempt to reach the store's host; c10d takes up to twice the timeout that it is given."""

_IDLE_SECONDS = 5.0
"""After this time without use a connection is tried out before the next call.

c10d's `set` reads no reply, so it reports success on a connection that the network has dropped. `add` must not be
repeated, so it needs a connection that works."""

_SPARE_SECONDS = 60.0
"""After this time without use a connection is closed if another one is free."""

CONNECTIONS = 4
"""Connections that a rank keeps. Four of its threads wait for other ranks: for an agreement, for the outcome of a
save, for an exit, and for the protection of a step in the memory of peers."""

_AT_ONCE = 2
"""Connections that a call opens without waiting for a free one."""

_SHARING_SECONDS = 0.1
"""How long a call waits for a free connection before it opens one of the others: most calls and waits are shorter.

A third connection is needed only where a save begins while the one before it waits for its outcome; a fourth where the
step before that is being protected as well."""

_CROWDED_SECONDS_MAX = 10.0
"""How long a call waits for a free connection before it opens one more than a rank keeps: the call may be urgent."""

_POLL_SECONDS = 0.001
"""How often a call that waits for a free connection looks."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Options of TCP: after a minute without an answer from the host a connection counts as broken."""

_LIBC = ctypes.CDLL(None)

_ADDRESS_BYTES = 128
"""Size of the largest socket address, `sockaddr_storage`."""


class Connection:
    """A connection that is used by one call at a time; `store` is opened by the first call."""

    def __init__(self, *, is_kept: bool) -> None:
        """Open nothing yet.

        Args:
            is_kept: Whether the pool keeps the connection after the call.
        """
        self.is_kept = is_kept
        self.store: Store | None = None
        """The store over this connection; None before it is opened."""
        self.used_at = 0.0
        """When the last call over it ended, on the monotonic clock."""


class ConnectionPool:
    """The connections of a rank. A blocking wait occupies one until it ends.

    No lock: a signal handler may call while this thread is in here. The operations of a deque are atomic.
    """

    def __init__(self, given: Store) -> None:
        """Open nothing yet.

        Args:
            given: The store of the training; another process may be its host.
        """
        self._given = given  # The host process serves only while this object lives; clones do not keep it alive.
        inner = store_without_prefix(given)
        self._host = (inner.host, inner.port) if isinstance(inner, TCPStore) else None
        self._clock = SystemClock()
        # Open and free, the newest last: few are in use.
        self._free: deque[Connection] = deque()
        # Not open, and not in use.
        self._closed = deque(Connection(is_kept=True) for _ in range(CONNECTIONS))

    def take(self, timeout_seconds: float) -> Connection:
        """Return a connection that no other call uses; `give_back` or `drop` must follow.

        If several threads wait for other ranks, a call waits for a free connection rather than opens one more. But it
        never waits for long: the call may be what another rank waits for.
        """
        start = self._clock.monotonic_seconds()
        while True:
            with suppress(IndexError):
                return self._free.pop()
            waited = self._clock.monotonic_seconds() - start
            closed = len(self._closed)
            may_open = closed > CONNECTIONS - _AT_ONCE or waited >= min(timeout_seconds / 3, _SHARING_SECONDS)
            if closed and may_open:
                with suppress(IndexError):
                    return self._closed.pop()
            elif not closed and waited >= min(timeout_seconds / 3, _CROWDED_SECONDS_MAX):
                return Connection(is_kept=False)
            self._clock.sleep(_POLL_SECONDS)

    def opened(self, connection: Connection, timeout_seconds: float) -> Store:
        """Return the store over a connection, opened if it is not, and tried out if it was idle.

        Raises:
            RuntimeError: The host cannot be reached, or the connection was dropped while it was idle.
        """
        if connection.store is None:
            connect_seconds = min(timeout_seconds / 3, _CONNECT_SECONDS_MAX)
            connection.store = self._connect(timedelta(seconds=max(connect_seconds, 0.001)))
        elif self._clock.monotonic_seconds() - connection.used_at > _IDLE_SECONDS:
            limit(connection.store, timeout_seconds)
            connection.store.check([_PREFIX])
        return connection.store

    def give_back(self, connection: Connection) -> None:
        """Take back a connection that works, and close one that nobody has needed for long."""
        now = connection.used_at = self._clock.monotonic_seconds()
        if connection.is_kept:
            self._free.append(connection)
        else:
            connection.store = None
        # The first one was unused for the longest time. Another thread may take it meanwhile, and the next is closed.
        with suppress(IndexError):
            while len(self._free) > 1 and now - self._free[0].used_at > _SPARE_SECONDS:
                self.drop(self._free.popleft())

    def drop(self, connection: Connection) -> None:
        """Close a connection: it is broken, or nobody needs it."""
        connection.store = None
        if connection.is_kept:
            self._closed.append(connection)

    def drop_free(self) -> None:
        """Close all connections that are free: what broke another one may have broken them."""
        with suppress(IndexError):
            while True:
                self.drop(self._free.pop())

    def _connect(self, timeout: timedelta) -> Store:
        if self._host is None:
            given: Any = self._given  # torch annotates `clone` since 2.14.
            return PrefixStore(_PREFIX, given.clone())
        # No clone: it inherits the timeout of the training's store, and tries that long if the host is gone.
        host, port = self._host
        store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        _keep_alive(port)
        return PrefixStore(_PREFIX, store)


def limit(store: Store, seconds: float) -> timedelta:
    """Limit the next call over a connection; return the limit."""
    duration = timedelta(seconds=max(seconds, 0.001))
    store.set_timeout(duration)
    return duration


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
