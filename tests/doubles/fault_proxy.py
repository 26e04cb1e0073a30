"""A proxy on loopback between an HTTP client and its server that injects the faults of a network.

It passes bytes as they are, so that signatures stay valid, and one fault meets one request. The server behind it is a
real one.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

_PIECE_BYTES = 1 << 16
_HEAD_BYTES_MAX = 1 << 16


class FaultKind(Enum):
    """What happens to a request."""

    CUT_BEFORE = "cut before"
    """The connection is reset when the head of the request is there. The server sees nothing."""

    CUT_AFTER = "cut after"
    """The server answers, and the connection is reset instead of passing the reply on."""

    REFUSE = "refuse"
    """The proxy answers with `status`. The server sees nothing."""

    DELAY = "delay"
    """The request waits for `seconds` before it is passed on."""

    SILENCE = "silence"
    """Nothing is read, passed or answered until `release`; then the connection is reset."""

    FLIP_REQUEST = "flip request"
    """One bit of the request's body is flipped, at byte `offset`."""

    FLIP_REPLY = "flip reply"
    """One bit of the reply's body is flipped, at byte `offset`."""


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """A request that reached the proxy."""

    method: str
    """Such as `PUT`."""

    target: str
    """Path and query."""

    body_bytes: int
    """Size of its body; 0 if the client does not say."""


@dataclass(slots=True)
class ProxyFault:
    """A fault that meets the first requests it fits."""

    kind: FaultKind
    """What happens."""

    fits: Callable[[ProxiedRequest], bool] = lambda _: True
    """Whether it may meet a request."""

    times: float = 1
    """How many requests meet it; `math.inf`: all until `FaultProxy.heal`."""

    skip: int = 0
    """How many requests that fit pass unharmed first."""

    status: int = 503
    """Status of the reply of `REFUSE`."""

    code: str = "SlowDown"
    """Code in the error document of that reply."""

    retry_after_seconds: int | None = None
    """`Retry-After` of that reply; None: there is none."""

    seconds: float = 0.0
    """Length of `DELAY`."""

    offset: int = 0
    """Byte of the body in which `FLIP_REQUEST` and `FLIP_REPLY` flip a bit. A shorter body passes unharmed."""

    met: int = 0
    """How many requests have met it; 0 means that a test has tested nothing."""

    reached: threading.Event = field(default_factory=threading.Event)
    """Set once a request meets it."""

    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """End `SILENCE` and `DELAY`."""
        self._released.set()


class FaultProxy:
    """Passes requests on, each client on a thread of its own. Use it as a context."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on a free port of loopback.

        Args:
            host, port: The server.
        """
        self._server = host, port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        """The port of the proxy."""
        self.url = f"http://127.0.0.1:{self.port}"
        """Where clients connect to."""
        self.requests: list[ProxiedRequest] = []
        """Every request so far, in the order in which their heads came."""
        self._faults: list[ProxyFault] = []
        self._lock = threading.Lock()
        self._open = set[socket.socket]()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._begin(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        # A blocked `accept` ends with an error once the socket is shut down.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            _reset(each)
        for thread in self._threads:
            thread.join(60)

    def inject(self, fault: ProxyFault) -> ProxyFault:
        """Arm a fault behind those that are armed; return it."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Disarm all faults, and end those that hold requests."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.release()

    def _due(self, request: ProxiedRequest) -> ProxyFault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.met >= fault.times or not fault.fits(request):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.met += 1
                fault.reached.set()
                return fault
        return None

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._begin(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        """Pass on the requests of one connection, one after the other, until it ends or a fault ends it."""
        try:
            with self._reset_at_end(client):
                exchange = _Exchange(_Stream(client), self._connected, self._due)
                while exchange.pass_one():
                    pass
        except OSError:
            pass

    @contextmanager
    def _connected(self) -> Iterator[_Stream]:
        """Connect to the server for one request: it may have closed a connection that was idle."""
        server = socket.create_connection(self._server)
        with self._reset_at_end(server):
            yield _Stream(server)

    @contextmanager
    def _reset_at_end(self, connection: socket.socket) -> Iterator[None]:
        """Reset a connection after the block, so that no byte which waits in a buffer is sent any more."""
        self._open.add(connection)
        try:
            yield
        finally:
            self._open.discard(connection)
            _reset(connection)


def _reset(connection: socket.socket) -> None:
    """End a connection with a reset."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Wakes a thread that is blocked in a call on it.
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The other side was faster.
    connection.close()


class _Stream:
    """Bytes of one connection, with those that came too early."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._ahead = b""

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def end(self) -> None:
        """End this side, and wait for the other one: a reset would discard what is still under way."""
        self._connection.shutdown(socket.SHUT_WR)
        while self._connection.recv(_PIECE_BYTES):
            pass

    def receive(self) -> bytes:
        ahead, self._ahead = self._ahead, b""
        return ahead or self._connection.recv(_PIECE_BYTES)

    def head(self) -> bytes:
        """Return a head with its empty line; empty if the connection ends instead."""
        return self._until(b"\r\n\r\n")

    def _until(self, end: bytes) -> bytes:
        data = b""
        while end not in data:
            piece = self.receive()
            if not piece or len(data) > _HEAD_BYTES_MAX:
                return b""
            data += piece
        head, _, rest = data.partition(end)
        self._ahead = rest
        return head + end

    def pieces(self, length: float) -> Iterator[bytes]:
        """Yield so many bytes, or fewer if the connection ends."""
        while length > 0 and (piece := self.receive()):
            if len(piece) > length:
                piece, self._ahead = piece[: int(length)], piece[int(length) :]
            length -= len(piece)
            yield piece

    def chunks(self) -> Iterator[bytes]:
        """Yield a chunked body with its framing."""
        while size := self._until(b"\r\n"):
            yield size
            length = int(size.partition(b";")[0], 16)
            if not length:
                while line := self._until(b"\r\n"):
                    yield line
                    if line == b"\r\n":
                        return
            yield from self.pieces(length + 2)


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().lower()
    return None


class _Exchange:
    """The requests and replies of one connection."""

    def __init__(
        self,
        client: _Stream,
        connected: Callable[[], AbstractContextManager[_Stream]],
        due: Callable[[ProxiedRequest], ProxyFault | None],
    ) -> None:
        self._client, self._connected, self._due = client, connected, due

    def pass_one(self) -> bool:
        """Pass one request and its reply on; return whether another may follow."""
        head = self._client.head()
        if not head:
            return False
        method, target, *_ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        request = ProxiedRequest(method, target, int(_header(head, b"content-length") or 0))
        fault = self._due(request)
        kind = None if fault is None else fault.kind
        if fault is not None and kind in (FaultKind.SILENCE, FaultKind.DELAY):
            fault._released.wait(None if kind is FaultKind.SILENCE else fault.seconds)
        if kind in (FaultKind.SILENCE, FaultKind.CUT_BEFORE):
            return False
        if fault is not None and kind is FaultKind.REFUSE:
            return self._refuse(head, fault)
        with self._connected() as server:
            return self._pass(request, head, server, fault)

    def _pass(self, request: ProxiedRequest, head: bytes, server: _Stream, fault: ProxyFault | None) -> bool:
        """Pass a request to the server, and its reply back."""
        server.send(head)
        if _header(head, b"expect") == b"100-continue":
            interim = server.head()
            self._client.send(interim)
            if b" 100 " not in interim.split(b"\r\n", 1)[0]:
                return False
        for piece in _flipped(self._body(self._client, head, otherwise=0), fault, FaultKind.FLIP_REQUEST):
            server.send(piece)
        reply = server.head()
        if not reply or (fault is not None and fault.kind is FaultKind.CUT_AFTER):
            return False
        status = int(reply.split(b" ", 2)[1])
        has_body = request.method != "HEAD" and status >= 200 and status not in (204, 304)
        self._client.send(reply)
        if has_body:
            for piece in _flipped(self._body(server, reply, otherwise=math.inf), fault, FaultKind.FLIP_REPLY):
                self._client.send(piece)
        if any(b"close" in (_header(each, b"connection") or b"") for each in (head, reply)):
            self._client.end()
            return False
        return True

    def _refuse(self, head: bytes, fault: ProxyFault) -> bool:
        if _header(head, b"expect") != b"100-continue":
            for _ in self._body(self._client, head, otherwise=0):
                pass
        lines = [b"HTTP/1.1 %d Refused" % fault.status, b"Content-Type: application/xml"]
        if fault.retry_after_seconds is not None:
            lines.append(b"Retry-After: %d" % fault.retry_after_seconds)
        document = f"<Error><Code>{fault.code}</Code><Message>Refused by a test.</Message></Error>"
        body = b"" if head.startswith(b"HEAD ") else document.encode()
        lines.append(b"Content-Length: %d" % len(body))
        self._client.send(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        return True

    @staticmethod
    def _body(source: _Stream, head: bytes, *, otherwise: float) -> Iterator[bytes]:
        """Yield the body that follows a head; `otherwise` is its length if the head does not say."""
        if (_header(head, b"transfer-encoding") or b"").endswith(b"chunked"):
            return source.chunks()
        length = _header(head, b"content-length")
        return source.pieces(otherwise if length is None else int(length))


def _flipped(pieces: Iterator[bytes], fault: ProxyFault | None, kind: FaultKind) -> Iterator[bytes]:
    """Yield pieces, and flip a bit if the fault is of this kind."""
    begin = 0
    for piece in pieces:
        if fault is not None and fault.kind is kind and begin <= fault.offset < begin + len(piece):
            changed = bytearray(piece)
            changed[fault.offset - begin] ^= 1
            yield bytes(changed)
        else:
            yield piece
        begin += len(piece)
