"""A TCP connection of the wire, on which no wait is without an end."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
from contextlib import suppress

from holdfast.base.clock import SystemClock
from holdfast.base.ports.temporary import TemporaryError
from holdfast.base.wire.framing import AGENT, HEADER_BYTES_MAX, NONCE_BYTES, PROOF, RANK, Exchange, Head, Session
from holdfast.errors import CorruptError
from holdfast.settings import KIB

USER_TIMEOUT_SECONDS = 10
"""After so long without an acknowledgement the kernel gives the connection up. The default is a quarter of an
hour."""

_FIRST_BYTES = 4 * KIB
"""Bytes of one read of a header. Those of a body among these are copied once more."""


_FRESH_SECONDS = 25.0
"""A connection is used again so long after the last exchange began. An agent closes after 30 s without a
byte."""

_CONNECT_SECONDS_MAX = 3.0
"""Longest wait for a connection: within it a packet that was lost is sent again. A node that is gone says nothing."""

_TICK_SECONDS = 0.1

_CLOCK = SystemClock()
"""No other clock: the kernel measures the waits."""


def new_nonce() -> str:
    """Return a nonce of one end."""
    return _CLOCK.random_bytes(NONCE_BYTES).hex()


class LinkCut(TemporaryError):
    """The connection failed, or the other end did not answer in time."""


class LinkSilent(LinkCut):
    """The other end cannot be reached, or did not answer in time."""


class Link:
    """A connection, and the bytes of a body that the other end still owes; one thread uses it at a time.

    The waits are those of the kernel (`SO_RCVTIMEO`), so that one system call brings a whole body.
    """

    def __init__(self, connection: socket.socket, role: str, where: str) -> None:
        """Take over a connected socket.

        Args:
            connection: The socket.
            role: The role of this end.
            where: The other end, for messages.
        """
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_SECONDS * 1000)
        self._socket, self._role, self.where = connection, role, where
        self._exchange, self._number, self._ahead = Exchange(role), 0, memoryview(b"")
        self._wait_ticks = dict[int, int]()
        self.begun_seconds, self._has_head = _CLOCK.monotonic_seconds(), False
        """When the exchange began."""
        self.idle_seconds = self._deadline = math.inf
        """Longest wait for a byte."""
        self.session: Session | None = None
        """Proves headers, once there is one."""
        self.is_proven = False
        """Whether the last header of the other end was proven."""
        self.owed_bytes = 0
        """Bytes of the body that were not taken yet."""

    @classmethod
    def connected(cls, address: tuple[str, int], where: str, seconds: float) -> Link:
        """Connect a rank to an agent; all waits end after so many seconds.

        Raises:
            LinkSilent: The agent does not answer.
        """
        begun_seconds = _CLOCK.monotonic_seconds()
        try:
            link = cls(socket.create_connection(address, min(seconds, _CONNECT_SECONDS_MAX)), RANK, where)
        except OSError as error:
            raise LinkSilent(f"{where}: does not answer ({error.strerror or error}); retry") from error
        link.end_in(begun_seconds + seconds - _CLOCK.monotonic_seconds())
        return link

    def end_in(self, seconds: float) -> None:
        """Let all waits end after so many seconds from now."""
        self._deadline = _CLOCK.monotonic_seconds() + seconds

    def begin_next(self) -> None:
        """Begin the next exchange."""
        self._exchange, self._number = Exchange(self._role), self._number + 1
        self.is_proven, self.owed_bytes = False, 0
        self.begun_seconds, self._has_head = _CLOCK.monotonic_seconds(), False

    def receive_head(self) -> Head:
        """Return the header of the other end; the body is owed from then on.

        Raises:
            CorruptError: This is no header of the wire, or more follows than the body: no end sends ahead.
            LinkCut: No header came.
        """
        room, head, left = memoryview(bytearray(_FIRST_BYTES)), None, HEADER_BYTES_MAX
        while head is None:
            if not left:
                raise CorruptError(f"header: more than {HEADER_BYTES_MAX} bytes; expected at most so many")
            count = self._receive(room[:left], 0)
            self._has_head = True
            left, head = left - count, self._exchange.receive(bytes(room[:count]))
        self._ahead, self.owed_bytes = memoryview(self._exchange.rest), head.body_bytes
        if len(self._ahead) > self.owed_bytes:
            raise CorruptError(f"{len(self._ahead)} bytes behind a header with a body of {self.owed_bytes}")
        other = AGENT if self._role == RANK else RANK
        self.is_proven = self.session is not None and self.session.is_proven(other, self._number, head)
        return head

    def receive_into(self, room: memoryview) -> None:
        """Fill `room` with the next bytes of the body."""
        while room:
            count = min(len(self._ahead), len(room))
            if count:
                room[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            else:
                count = self._receive(room, socket.MSG_WAITALL)
            room, self.owed_bytes = room[count:], self.owed_bytes - count

    def _receive(self, room: memoryview, flags: int) -> int:
        self._limit_wait(socket.SO_RCVTIMEO)
        try:
            count = self._socket.recv_into(room, 0, flags)
        except OSError as error:
            raise self._cut(error) from error
        if not count:
            raise LinkCut(f"{self.where}: closed the connection", may_take_effect=True)
        return count

    def send_head(self, head: Head, *, more: bool = False) -> None:
        """Send a header, with a proof if there is a session; `more` says that a body follows at once."""
        if self.session is not None:
            head.fields[PROOF] = self.session.proof(self._role, self._number, head)
        self.send(self._exchange.send(head), more=more)

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Send bytes."""
        left = memoryview(data)
        while left:
            self._limit_wait(socket.SO_SNDTIMEO)
            try:
                left = left[self._socket.send(left, socket.MSG_MORE if more else 0) :]
            except OSError as error:
                raise self._cut(error) from error

    def send_file(self, fd: int, start: int, stop: int) -> None:
        """Send a range of an open file."""
        while start < stop:
            self._limit_wait(socket.SO_SNDTIMEO)
            try:
                count = os.sendfile(self._socket.fileno(), fd, start, stop - start)
            except OSError as error:
                raise self._cut(error) from error
            if not count:
                raise LinkCut(f"{self.where}: the file was cut short meanwhile")
            start += count

    def is_fresh(self) -> bool:
        """Return whether the connection stands, was used a moment ago, and the other end has sent nothing."""
        return _CLOCK.monotonic_seconds() - self.begun_seconds < _FRESH_SECONDS and not self._has_come()

    def is_idle(self) -> bool:
        """Return whether nothing of the next header has come."""
        return not self._has_head and not self._has_come()

    def _has_come(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def cut(self) -> None:
        """End the connection from another thread: the call that waits on it fails."""
        with suppress(OSError):  # The connection may have failed already.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _limit_wait(self, option: int) -> None:
        seconds = min(self.idle_seconds, self._deadline - _CLOCK.monotonic_seconds())
        if seconds <= 0:
            raise self._cut(TimeoutError())
        # The kernel takes 0 for a wait without an end. Whole ticks: most waits are then as long as the one before.
        ticks = 0 if seconds == math.inf else math.ceil(seconds / _TICK_SECONDS)
        if ticks != self._wait_ticks.get(option):
            self._wait_ticks[option] = ticks
            value = struct.pack("ll", *divmod(int(ticks * _TICK_SECONDS * 1e6), 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def _cut(self, error: OSError) -> LinkCut:
        if isinstance(error, BlockingIOError | TimeoutError):
            return LinkSilent(f"{self.where}: did not answer in time", is_throttled=True, may_take_effect=True)
        why = f"the connection failed ({error.strerror or error})"
        return LinkCut(f"{self.where}: {why}", may_take_effect=True)
