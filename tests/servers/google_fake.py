"""A fake of Google Cloud Storage, as a program: `python -P google_fake.py PORT BUCKET TOKEN`.

It is no server that others run, and proves nothing about Google's. It is here because none is known that keeps Google's
preconditions. It speaks what the client library asks of the XML API: objects with generations, the preconditions
`x-goog-if-generation-match` and `x-goog-if-metageneration-match`, listings, copies, ranges, and errors as Google words
them. It also hands out tokens, as the metadata server of a machine does, and as a token service does. It keeps all in
memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import urllib.parse
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

_TOKEN_SECONDS = 3600
_PAGE_ENTRIES = 1000


@dataclass(frozen=True)
class Stored:
    """One version of an object."""

    data: bytes
    generation: int
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"',
            "x-goog-generation": str(self.generation),
            "x-goog-metageneration": "1",
            "x-goog-stored-content-length": str(len(self.data)),
            "Last-Modified": self.modified,
        }


class Refused(Exception):
    """An error as Google words it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


ABSENT = (404, "NoSuchKey", "The specified key does not exist.")
FAILED = (412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")


class Objects:
    """All objects of one bucket. Each call is atomic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Stored] = {}
        self._generation = 1_700_000_000_000_000

    def get(self, name: str) -> Stored:
        with self._lock:
            if name not in self._by_name:
                raise Refused(*ABSENT)
            return self._by_name[name]

    def put(self, name: str, data: bytes, condition: str | None) -> Stored:
        with self._lock:
            self._require(name, condition)
            self._generation += 1
            stored = self._by_name[name] = Stored(data, self._generation)
            return stored

    def delete(self, name: str, condition: str | None) -> None:
        with self._lock:
            if name not in self._by_name:
                raise Refused(*ABSENT)
            self._require(name, condition)
            del self._by_name[name]

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._by_name, key=str.encode)

    def _require(self, name: str, condition: str | None) -> None:
        if condition is None:
            return
        stored = self._by_name.get(name)
        if int(condition) != (stored.generation if stored else 0):
            raise Refused(*FAILED)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects = Objects()
    bucket, token = "", ""

    def log_message(self, format: str, *args: object) -> None:
        sys.stdout.write(f"{self.command} {self.path} {format % args}\n")

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        try:
            if url.path.startswith("/computeMetadata/"):
                if self.headers.get("Metadata-Flavor") != "Google":
                    raise Refused(403, "Forbidden", "Missing Metadata-Flavor:Google header.")
                if not url.path.endswith("/token"):
                    raise Refused(404, "NotFound", "This machine has no such attribute.")
                self._hand_out()
            elif url.path == "/token" and self.command == "POST":
                self._hand_out()
            else:
                self._serve(urllib.parse.unquote(url.path), query, body)
        except Refused as refused:
            text = f"<Error><Code>{refused.code}</Code><Message>{refused.message}</Message></Error>"
            document = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
            self._reply(refused.status, {"Content-Type": "application/xml; charset=UTF-8"}, document)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any

    def _hand_out(self) -> None:
        document = {
            "access_token": self.token,
            "expires_in": _TOKEN_SECONDS,
            "token_type": "Bearer",
            "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
        }
        self._reply(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _serve(self, path: str, query: dict[str, str], body: bytes) -> None:
        found = self.headers.get("Authorization")
        if found is None:
            raise Refused(401, "AuthenticationRequired", "Authentication required.")
        if found != f"Bearer {self.token}":
            raise Refused(401, "InvalidAuthentication", "Invalid authentication.")
        bucket, _, name = path.removeprefix("/").partition("/")
        if bucket != self.bucket:
            raise Refused(404, "NoSuchBucket", "The specified bucket does not exist.")
        condition = self.headers.get("x-goog-if-generation-match")
        if not name and self.command == "GET":
            self._list(query)
        elif self.command in ("GET", "HEAD"):
            self._read(self.objects.get(name))
        elif self.command == "PUT" and len(name.encode()) > 1024:
            raise Refused(400, "InvalidArgument", "The object name is too long.")
        elif self.command == "PUT":
            source = self.headers.get("x-goog-copy-source")
            if source is not None:
                from_bucket, _, from_name = urllib.parse.unquote(source).removeprefix("/").partition("/")
                assert from_bucket == self.bucket, "one bucket"
                body = self.objects.get(from_name).data
            stored = self.objects.put(name, body, condition)
            document = b"<CopyObjectResult></CopyObjectResult>" if source is not None else b""
            self._reply(200, stored.headers, document)
        elif self.command == "DELETE":
            self.objects.delete(name, condition)
            self._reply(204, {}, b"")
        else:
            raise Refused(501, "NotImplemented", "The fake does not know this request.")

    def _read(self, stored: Stored) -> None:
        asked = self.headers.get("Range")
        if asked is None:
            self._reply(200, stored.headers, stored.data)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), int(last) + 1 if last else len(stored.data)
        if start >= len(stored.data):
            raise Refused(416, "InvalidRange", "The requested range cannot be satisfied.")
        data = stored.data[start:stop]
        place = {"Content-Range": f"bytes {start}-{start + len(data) - 1}/{len(stored.data)}"}
        self._reply(206, stored.headers | place, data)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        # A page begins behind the last name of the one before, or behind what was asked for.
        after = query.get("continuation-token") or query.get("start-after", "")
        entries, folders, is_cut, last = [], [], False, ""
        for name in self.objects.names():
            folder = ""
            if not name.startswith(prefix) or name.encode() <= after.encode():
                continue
            if delimiter and delimiter in name[len(prefix) :]:
                folder = prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter
                # A page ended within this folder: all of it was on that page.
                if folder in folders or after.startswith(folder):
                    continue
            if len(entries) + len(folders) == _PAGE_ENTRIES:
                is_cut = True
                break
            last = name
            if folder:
                folders.append(folder)
            else:
                entries.append(name)
        self._reply(200, {"Content-Type": "application/xml"}, self._page(entries, folders, last if is_cut else ""))

    def _page(self, entries: list[str], folders: list[str], following: str) -> bytes:
        parts = []
        for name in entries:
            try:
                stored = self.objects.get(name)
            except Refused:
                continue  # Deleted meanwhile.
            parts.append(
                f"<Contents><Key>{escape(name)}</Key><Generation>{stored.generation}</Generation>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{stored.headers['ETag']}</ETag>"
                f"<Size>{len(stored.data)}</Size></Contents>"
            )
        parts += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
        if following:
            parts.append(f"<NextContinuationToken>{escape(following)}</NextContinuationToken>")
        text = f"<IsTruncated>{str(bool(following)).lower()}</IsTruncated>{''.join(parts)}"
        return f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{text}</ListBucketResult>".encode()

    def _reply(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class Fake(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that were killed, or gave up, are what tests are about."""


if __name__ == "__main__":
    Handler.bucket, Handler.token = sys.argv[2:4]
    with Fake(("127.0.0.1", int(sys.argv[1])), Handler) as fake:
        fake.serve_forever()
