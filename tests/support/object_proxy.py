"""A proxy before a server of objects, which answers some requests itself, changes them, or loses replies."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOST = "lost"
"""The server gets the request, and its reply is lost."""

CUT = "cut"
"""The connection ends before the server gets the request."""


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    """By lower-case name; a rule may change them."""

    port: int
    """Of the client: the same for all requests on one connection."""


Rule = Callable[[Asked], "tuple[int, str] | bytes | str | None"]
"""Returns an answer of its own (status and code of the error, or the content of a 200), `LOST`, `CUT`, or None: pass it
on."""


@dataclass
class ObjectProxy:
    """What the proxy does, and what it has seen."""

    endpoint: str = ""
    rule: Rule = lambda _: None
    asked: list[Asked] = field(default_factory=list)

    def count(self, method: str, part: str = "") -> int:
        """Return how many requests of a method had a text in their path."""
        return sum(each.method == method and part in each.path for each in self.asked)


@contextmanager
def object_proxy(upstream: str, certificate: Path | None = None) -> Iterator[ObjectProxy]:
    """Run a proxy before a server for the length of a block; over TLS if it has a certificate."""
    proxy = ObjectProxy()
    host = upstream.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, headers, self.client_address[1])
            proxy.asked.append(asked)
            answer = proxy.rule(asked)
            if answer == CUT:
                self.close_connection = True
                return
            if isinstance(answer, bytes):
                self._reply(200, {"content-type": "application/xml"}, answer)
                return
            if isinstance(answer, tuple):
                status, code = answer
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said by the server</Message></Error>"
                self._reply(status, {"content-type": "application/xml"}, text.encode())
                return
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request(asked.method, asked.path, body, asked.headers)
            reply = connection.getresponse()
            data = reply.read()
            connection.close()
            if answer == LOST:
                self.close_connection = True
                return
            headers = {name.lower(): value for name, value in reply.getheaders()}
            self._reply(reply.status, headers, data)

        def _reply(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(data))
            if status != 204:
                self.send_header("content-length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing: clients that were killed, or gave up, are what these tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.endpoint = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake is the business of the thread of a connection, not of the one that accepts them.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
