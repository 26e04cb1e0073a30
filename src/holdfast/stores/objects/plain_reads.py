"""Reads of S3 over plain HTTP straight into the memory of their caller, on connections that are kept.

The client library hands out memory of its own: each byte is copied once more, and is in the processor's cache no longer
when it is hashed. Over TLS, through a proxy, and of other vendors the library reads: Python takes 16 KiB of TLS at a
time.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.parse
import urllib.request
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.ports.store import Buffers, ByteRanges, OnRange
from holdfast.settings import KIB, MIB, ObjectSettings
from holdfast.stores.objects.client import Clients
from holdfast.stores.objects.refusals import refusal
from holdfast.stores.objects.signed import SignedRequests

_BYTES_MIN, _BYTES_MAX = 256 * KIB, 64 * MIB
"""Bytes of a request. Fewer are not worth a signature made here. Of more the library reads parts side by side."""

_GAP_BYTES_MAX = 256 * KIB
"""Bytes between two ranges that are read along, and dropped."""

_KEPT_MAX = 64
"""Connections kept for later requests."""

_CONNECT_SECONDS_MAX = 10.0
_HEAD_BYTES_MAX = 64 * KIB
_QUICK_ACK = getattr(socket, "TCP_QUICKACK", None)
"""Makes the kernel acknowledge at once. A server may hold a last, short segment back until then: 40 ms otherwise."""


class PlainReads:
    """Makes ranged requests to one bucket. Safe in any thread, and in a process that was forked."""

    def __init__(self, clients: Clients, settings: ObjectSettings, requests: SignedRequests) -> None:
        """Remember where; does no I/O."""
        self._clients, self._requests = clients, requests
        self._may_read = not settings.anonymous and settings.proxy is None
        self.sends_whole_objects = False
        """Whether the server was asked for a part, and did not say that it sent one."""
        self._process = os.getpid()
        self._kept: deque[_Connection] = deque()

    def reads(self, ranges: ByteRanges) -> bool:
        """Return whether some ranges are read here: in order, close together, of some size."""
        endpoint = self._clients.endpoint
        if not self._may_read or not ranges or endpoint is None or not endpoint.startswith("http://"):
            return False
        at, end = ranges[0][0], ranges[-1][1]
        if not _BYTES_MIN <= end - at <= _BYTES_MAX:
            return False
        for start, stop in ranges:
            if not 0 <= start - at <= _GAP_BYTES_MAX or stop < start:
                return False
            at = stop
        return not _is_proxied(urllib.parse.urlsplit(endpoint).hostname or "")

    def read(self, where: str, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None) -> bool:
        """Read ranges by one request; return False, with nothing read, if the server does not send exactly these bytes.

        Args:
            where: Store and key, for messages.
            key: Full key of the object.
            ranges, buffers, on_range: As for `Readable.read_into`; `reads` has said that they are read here.
        Raises:
            CheckpointError: The request failed.
        """
        at, end = ranges[0][0], ranges[-1][1]
        connection = self._asked(where, key, at, end)
        if connection is None:
            return False
        try:
            for number, (start, stop) in enumerate(ranges):
                view = buffers[number]
                if stop > start:  # An empty buffer cannot be cast.
                    view = view.cast("B")
                    connection.skip(start - at)
                    connection.read_into(view)
                    at = stop
                if on_range is not None:
                    on_range(number, view)
        except _Broken as broken:
            connection.close()
            raise refusal("read", where, OSError(str(broken))) from None
        except BaseException:
            connection.close()
            raise
        self._keep(connection)
        return True

    def _asked(self, where: str, key: str, start: int, stop: int) -> _Connection | None:
        """Return a connection on which exactly these bytes come; None if the server answers something else.

        Raises:
            CheckpointError: It failed, or the server did.
        """
        url, headers = self._requests.signed("GET", key, {}, b"", {"range": f"bytes={start}-{stop - 1}"})
        split = urllib.parse.urlsplit(url)
        lines = [f"GET {split.path} HTTP/1.1", f"host: {split.netloc}", "accept-encoding: identity"]
        request = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()
        seconds = self._clients.seconds_for(stop - start)
        try:
            connection, answer = self._answered(split, request, seconds)
            if answer.brings(start, stop):
                return connection
            try:
                text = connection.text(answer) if answer.status >= 500 or answer.status == 429 else None
            finally:
                connection.close()
            self.sends_whole_objects |= answer.status == 200
        except _Broken as broken:
            raise refusal("read", where, OSError(str(broken))) from None
        if text is not None:
            raise refusal("read", where, OSError(f"status code: {answer.status} {text}"))
        return None

    def _answered(
        self, server: urllib.parse.SplitResult, request: bytes, seconds: float
    ) -> tuple[_Connection, _Answer]:
        """Send a request; return its connection, and how the answer begins."""
        silence_seconds = self._clients.silence_seconds
        kept = self._taken()
        if kept is not None:
            try:
                return kept, kept.ask(request, seconds, silence_seconds)
            except _Broken as broken:
                kept.close()
                if broken.is_late:
                    raise
                # The server had closed it, most likely.
        new = _Connection(server.hostname or "", server.port or 80, min(seconds, _CONNECT_SECONDS_MAX))
        try:
            return new, new.ask(request, seconds, silence_seconds)
        except BaseException:
            new.close()
            raise

    def _taken(self) -> _Connection | None:
        if self._process != os.getpid():
            # The parent uses these, so this process only forgets them.
            self._process, self._kept = os.getpid(), deque()
        with suppress(IndexError):
            return self._kept.pop()
        return None

    def _keep(self, connection: _Connection) -> None:
        if connection.may_be_kept and len(self._kept) < _KEPT_MAX and self._process == os.getpid():
            self._kept.append(connection)
        else:
            connection.close()


def _is_proxied(host: str) -> bool:
    """Return whether the variables name a proxy for a host, which the library then uses."""
    proxies = urllib.request.getproxies()
    return bool(proxies.get("http") or proxies.get("all")) and not urllib.request.proxy_bypass(host)


@dataclass(frozen=True, slots=True)
class _Answer:
    """How an answer begins."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""

    @property
    def length(self) -> int | None:
        """Bytes of its content; None if it does not say."""
        stated = self.headers.get("content-length", "")
        return int(stated) if stated.isdecimal() and "transfer-encoding" not in self.headers else None

    def brings(self, start: int, stop: int) -> bool:
        """Return whether exactly these bytes of the object follow."""
        stated = self.headers.get("content-range", "")
        return self.status == 206 and self.length == stop - start and stated.startswith(f"bytes {start}-{stop - 1}/")


class _Broken(Exception):
    """A connection failed."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late
        """Whether its time is over."""


class _Connection:
    """A connection over plain HTTP: one request after the other. Every method raises `_Broken` if it fails."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        """Connect."""
        try:
            self._socket = socket.create_connection((host, port), seconds)
        except OSError as error:
            raise _broken(error) from None
        # One that is kept goes with its store.
        weakref.finalize(self, self._socket.close)
        self._ahead = memoryview(b"")
        """What has come, and nobody has asked for yet."""
        self._deadline = self._silence_seconds = 0.0
        self.may_be_kept = False
        """Whether the server takes another request once the content of this one has been read."""

    def close(self) -> None:
        self._socket.close()

    def ask(self, request: bytes, seconds: float, silence_seconds: float) -> _Answer:
        """Send a request without content; return how the answer begins.

        Args:
            request: Its head.
            seconds: How long it may take, with the content of its answer.
            silence_seconds: How long nothing may come.
        """
        self._deadline, self._silence_seconds = time.monotonic() + seconds, silence_seconds
        self._begin()
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(request)
        except OSError as error:
            raise _broken(error) from None
        head = bytearray()
        piece = memoryview(bytearray(16 * KIB))
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) > _HEAD_BYTES_MAX:
                raise _Broken("the head of an answer is too long")
            head += piece[: self._received(piece)]
        self._ahead = memoryview(bytes(head[end + 4 :]))
        lines = head[:end].decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise _Broken("the answer is no HTTP/1.1")
        fields = (line.partition(":") for line in lines[1:])
        answer = _Answer(int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields})
        self.may_be_kept = version == "HTTP/1.1" and answer.headers.get("connection", "").lower() != "close"
        return answer

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes of the content."""
        at = min(len(self._ahead), len(buffer))
        buffer[:at], self._ahead = self._ahead[:at], self._ahead[at:]
        self._begin()
        while at < len(buffer):
            at += self._received(buffer[at:])

    def skip(self, count: int) -> None:
        """Drop the next bytes of the content."""
        if count:
            self.read_into(memoryview(bytearray(count)))

    def text(self, answer: _Answer) -> str:
        """Return the content of an error, cut if it is long."""
        content = memoryview(bytearray(min(answer.length or 0, _HEAD_BYTES_MAX)))
        self.read_into(content)
        return bytes(content).decode("utf-8", "replace")

    def _begin(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise _Broken("timed out", is_late=True)
        try:
            self._socket.settimeout(min(left, self._silence_seconds))
            if _QUICK_ACK is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
        except OSError as error:
            raise _broken(error) from None

    def _received(self, buffer: memoryview) -> int:
        """Receive some bytes; return how many."""
        try:
            count = self._socket.recv_into(buffer)
        except OSError as error:
            raise _broken(error) from None
        if not count:
            raise _Broken("the server closed the connection")
        if time.monotonic() > self._deadline:
            raise _Broken("timed out", is_late=True)
        return count


def _broken(error: OSError) -> _Broken:
    is_late = isinstance(error, TimeoutError)
    return _Broken("timed out" if is_late else str(error), is_late=is_late)
