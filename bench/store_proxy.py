"""A proxy that makes loopback a network: a speed for each connection, a delay before each reply, a record of both.

It is a process of its own, so that its work is in no contender's processor time. It passes bytes as they are.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_PIECE_BYTES = 1 << 18
_PIPE_BYTES = 1 << 20
_HEAD_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class Answered:
    """One request and its reply."""

    method: str
    target: str
    """Path and query."""

    began: float
    """When its head was there, on the clock of `time.monotonic`, which all processes share."""

    replied: float
    """When its reply began."""

    @property
    def is_pack(self) -> bool:
        """Whether it is for a pack: an upload, a range, a look at the size."""
        return self.target.partition("?")[0].endswith(".safetensors")


@dataclass(frozen=True)
class Line:
    """What a proxy makes of loopback; the arguments of `proxy`."""

    upstream: str
    record: str
    delay_seconds: float
    bytes_per_second: float | None
    adds_tags: bool


class Proxy:
    """A running proxy, for its maker."""

    def __init__(self, endpoint: str, record: Path) -> None:
        self.endpoint = endpoint
        self._record = record

    def take(self) -> list[Answered]:
        """Return the requests that were answered so far, by their beginning; forget them."""
        lines = self._record.read_text().splitlines()
        with self._record.open("w"):
            pass
        return sorted((Answered(**json.loads(line)) for line in lines), key=lambda each: each.began)


@contextmanager
def proxy(
    upstream: str,
    record: Path,
    *,
    delay_seconds: float = 0.0,
    bytes_per_second: float | None = None,
    adds_tags: bool = False,
) -> Iterator[Proxy]:
    """Run a proxy before a server for the length of a block.

    Args:
        upstream: URL of the server, over plain HTTP.
        record: File for the record.
        delay_seconds: Time that passes before each reply.
        bytes_per_second: What one connection carries, each way; None: as much as it can.
        adds_tags: Whether the reply that completes a multipart upload gets an `ETag` header, as Amazon sends it. Ceph
            16 has the tag in the body only.
    """
    assert upstream.startswith("http://"), f"{upstream}: a proxy cannot look into TLS"
    record.touch()
    line = Line(upstream, str(record), delay_seconds, bytes_per_second, adds_tags)
    command = [sys.executable, "-m", "bench.store_proxy", json.dumps(asdict(line))]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "it is a pipe"
            yield Proxy(f"http://127.0.0.1:{int(process.stdout.readline())}", record)
        finally:
            process.kill()


def serve(line: Line) -> None:
    """Listen, and pass each connection on from a thread of its own, until the maker ends this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener, Path(line.record).open("a", 1) as record:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_Connection(client, line).serve, args=(record.write,), daemon=True).start()


class _Connection:
    """One connection of a client, with one to the server."""

    def __init__(self, client: socket.socket, line: Line) -> None:
        self._line = line
        self._client = _Side(client, line.bytes_per_second)
        host, _, port = line.upstream.removeprefix("http://").rstrip("/").partition(":")
        server = socket.create_connection((host, int(port or 80)))
        self._server = _Side(server, line.bytes_per_second)

    def serve(self, write: Callable[[str], object]) -> None:
        """Pass requests and replies on until either side ends."""
        with suppress(OSError):
            while self._pass_one(write):
                pass
        self._client.close()
        self._server.close()

    def _pass_one(self, write: Callable[[str], object]) -> bool:
        head = self._client.head()
        if not head:
            return False
        began = time.monotonic()
        method, target = head.split(b" ", 2)[:2]
        self._server.send(head)
        self._client.pass_body(head, self._server)
        reply = self._server.head()
        if not reply:
            return False
        # What the server has taken counts: it is part of the time on the line.
        time.sleep(self._line.delay_seconds)
        answered = Answered(method.decode(), target.decode("latin-1"), began, time.monotonic())
        # Before the reply: who has it finds the record of it.
        write(json.dumps(asdict(answered)) + "\n")
        if self._line.adds_tags and method == b"POST" and not _header(reply, b"etag"):
            reply = reply[:-2] + b'ETag: "0"\r\n\r\n'
        self._client.send(reply)
        if method != b"HEAD" and reply.split(b" ", 2)[1] not in (b"204", b"304"):
            self._server.pass_body(reply, self._client)
        return True


class _Side:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, bytes_per_second: float | None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._bytes_per_second = connection, bytes_per_second
        self._ahead = b""
        self._pipe: tuple[int, int] | None = None

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        for end in self._pipe or ():
            os.close(end)

    def head(self) -> bytes:
        """Return a head with its empty line; empty if the connection ends instead."""
        data = self._ahead
        while b"\r\n\r\n" not in data:
            piece = self._connection.recv(_PIECE_BYTES)
            if not piece or len(data) > _HEAD_BYTES_MAX:
                return b""
            data += piece
        head, end, self._ahead = data.partition(b"\r\n\r\n")
        return head + end

    def pass_body(self, head: bytes, other: _Side) -> None:
        """Pass on the body that follows a head, at the speed of this connection."""
        if (_header(head, b"transfer-encoding") or b"").lower().endswith(b"chunked"):
            self._pass_chunks(other)
        else:
            self._pass_bytes(int(_header(head, b"content-length") or 0), other)

    def _pass_bytes(self, left: int, other: _Side) -> None:
        if self._bytes_per_second is None:
            self._splice(left, other)
            return
        start, passed = time.monotonic(), 0
        while left:
            piece, self._ahead = self._ahead or self._connection.recv(_PIECE_BYTES), b""
            if not piece:
                raise ConnectionError("ended within a body")
            piece, self._ahead = piece[:left], piece[left:]
            left -= len(piece)
            passed += len(piece)
            time.sleep(max(start + passed / self._bytes_per_second - time.monotonic(), 0.0))
            other.send(piece)

    def _splice(self, left: int, other: _Side) -> None:
        """Pass bytes on within the kernel: a copy here would take processor time from both contenders alike."""
        piece, self._ahead = self._ahead[:left], self._ahead[left:]
        if piece:
            other.send(piece)
        left -= len(piece)
        if left and self._pipe is None:
            self._pipe = os.pipe()
            with suppress(OSError):  # The most that this user may have.
                fcntl.fcntl(self._pipe[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        while left:
            assert self._pipe is not None, "made just now"
            taken = os.splice(self._connection.fileno(), self._pipe[1], min(left, _PIPE_BYTES))
            if not taken:
                raise ConnectionError("ended within a body")
            left -= taken
            while taken:
                taken -= os.splice(self._pipe[0], other._connection.fileno(), taken)

    def _pass_chunks(self, other: _Side) -> None:
        while True:
            while b"\r\n" not in self._ahead:
                piece = self._connection.recv(_PIECE_BYTES)
                if not piece:
                    raise ConnectionError("ended within a body")
                self._ahead += piece
            size, end, self._ahead = self._ahead.partition(b"\r\n")
            other.send(size + end)
            count = int(size.partition(b";")[0], 16)
            # A chunk ends with a line break, and so does the empty line behind the last one.
            self._pass_bytes(count + 2, other)
            if not count:
                return


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


if __name__ == "__main__":
    serve(Line(**json.loads(sys.argv[1])))
