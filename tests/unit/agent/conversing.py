"""A peer that speaks the wire byte by byte, with proofs of its own making; and an agent in a process of its own."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from holdfast.settings import MIB

RUN, SECRET, NODE = "run-7", bytes(range(100, 132)), "n3"
PACK = "step-000000000007/0123456789abcdef/r00000.safetensors"
PACK_BYTES = 16 * MIB
"""More than the buffers of both sockets hold."""

_PROGRAM = """
import logging, sys
from holdfast.agent.limits import Limits
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.shelf import ShelfStore
from holdfast.base.wire.framing import Credentials
from holdfast.settings import Settings
logging.basicConfig(level=logging.DEBUG)
limits = Limits(proving_seconds=float(sys.argv[2]), idle_seconds=float(sys.argv[3]))
credentials = Credentials(sys.argv[4], sys.stdin.buffer.read(32), sys.argv[5])
server = PeerServer(ShelfStore(sys.argv[1], settings=Settings()), credentials, "127.0.0.1", limits=limits, protect=bool)
print(server.address[1], flush=True)
sys.stdin.buffer.read()
"""


class Answer(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes


class Raw:
    """A connection that sends any bytes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.key, self.number, self._buffer = b"", 0, b""

    def send(self, data: bytes) -> Raw:
        try:
            self.socket.sendall(data)
        except OSError:
            pass  # The agent has closed; its answer may be here.
        return self

    def header(self, line: str, fields: dict[str, str], *, host: bool = True) -> bytes:
        fields = ({"host": "holdfast"} if host else {}) | fields
        return "".join([f"{line} HTTP/1.1\r\n", *(f"{n}: {v}\r\n" for n, v in fields.items()), "\r\n"]).encode(
            "latin-1"
        )

    def greet(self, secret: bytes = SECRET, **changed: str) -> Answer | None:
        nonce = os.urandom(32).hex()
        fields = {"holdfast-version": "1", "holdfast-run": RUN, "holdfast-node": NODE, "holdfast-nonce": nonce}
        fields |= {f"holdfast-{name}": value for name, value in changed.items()}
        answer = self.send(self.header("POST /session", fields)).answer()
        if answer is not None and answer.status == 200:
            text = "\n".join(("holdfast", "1", RUN, NODE, nonce, answer.fields["holdfast-nonce"]))
            self.key = hmac.new(secret, text.encode(), "sha256").digest()
        return answer

    def proof(self, line: str, fields: dict[str, str], number: int, role: str = "rank") -> str:
        lines = [role, str(number), line, *(f"{name}: {value}" for name, value in fields.items())]
        return hmac.new(self.key, "\n".join(lines).encode(), "sha256").hexdigest()

    def proven(self, line: str, fields: dict[str, str] | None = None) -> bytes:
        """Return a header with the proof of the next number."""
        fields = dict(fields or {})
        self.number += 1
        return self.header(line, fields | {"holdfast-proof": self.proof(line, fields, self.number)})

    def ask(self, line: str, fields: dict[str, str] | None = None, body: bytes = b"") -> Answer | None:
        return self.send(self.proven(line, fields) + body).answer("HEAD" in line)

    def answer(self, is_head: bool = False) -> Answer | None:
        """Return the next answer; None once the agent has closed without one."""
        while b"\r\n\r\n" not in self._buffer:
            if not self._more():
                return None
        text, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        count = 0 if is_head else int(fields.get("content-length", 0))
        while len(self._buffer) < count:
            if not self._more():
                return None
        body, self._buffer = self._buffer[:count], self._buffer[count:]
        return Answer(int(first.split()[1]), fields, body)

    def is_closed(self, seconds: float) -> bool:
        """Return whether the agent closes within so many seconds, whatever it sends before."""
        self.socket.settimeout(seconds)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)


def put_fields(data: bytes, **changed: str) -> dict[str, str]:
    digest = hashlib.sha256(data).hexdigest()
    return {"if-none-match": "*", "content-length": str(len(data)), "holdfast-digest": digest} | changed


class AgentProcess:
    """An agent whose memory can be looked at."""

    def __init__(self, folder: Path, proving_seconds: float, idle_seconds: float, printed: IO[bytes]) -> None:
        command = [sys.executable, "-c", _PROGRAM, str(folder), str(proving_seconds), str(idle_seconds), RUN, NODE]
        self._printed, pipe = printed, subprocess.PIPE  # A pipe of the log that is full would stop the agent.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=printed)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(SECRET)
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 60)[0], "the agent did not start"
        self.port = int(self.process.stdout.readline())

    def memory_bytes(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
        assert match is not None
        return int(match[1]) * 1024

    def forget_peak(self) -> int:
        """Let the peak of memory begin anew; return the memory."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory_bytes("VmRSS")

    def end(self) -> str:
        """End the agent; return all that it has printed."""
        out, _ = self.process.communicate(timeout=30)
        self._printed.seek(0)
        return (out + self._printed.read()).decode("utf-8", "replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def agent_process(folder: Path, proving_seconds: float, idle_seconds: float) -> Iterator[AgentProcess]:
    with TemporaryFile() as printed:
        agent = AgentProcess(folder, proving_seconds, idle_seconds, printed)
        try:
            yield agent
        finally:
            agent.kill()
