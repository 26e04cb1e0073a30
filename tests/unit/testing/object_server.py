"""A small HTTP server of objects on loopback: PUT, also on condition, GET of a range, HEAD and DELETE."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ObjectServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        data = self.rfile.read(length)
        if len(data) < length:
            return  # The client is gone: half an object is none.
        with self.server.lock:
            exists = self.path in self.server.objects
            if exists and self.headers["If-None-Match"] == "*":
                self._reply(412)
                return
            self.server.objects[self.path] = data
        self._reply(200)

    def do_GET(self) -> None:
        data = self.server.objects.get(self.path)
        if data is None:
            self._reply(404)
            return
        wanted = self.headers["Range"]
        if wanted is None:
            self._reply(200, data)
            return
        start, stop = wanted.removeprefix("bytes=").split("-")
        self._reply(206, data[int(start) : int(stop) + 1])

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        with self.server.lock:
            self.server.objects.pop(self.path, None)
        self._reply(204)

    def _reply(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
