"""Serves one folder to the peers of a run, within limits that no peer can break.

A connection passes through these states. One thread serves the connection, and the accepting thread may cut it off:

    unproven (greeting, then the first request) -> proven (requests and answers in turn) -> closed
    unproven -> closed, after `proving_seconds`, or as the oldest of too many
    proven -> closed, as the one of too many that waits longest for a request
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Protocol

import msgspec

from holdfast.agent.limits import DEFAULT_LIMITS, Limits
from holdfast.base.interrupts import start_thread
from holdfast.base.ports.store import Store
from holdfast.base.wire import framing
from holdfast.base.wire.framing import (
    AGENT,
    DIGEST,
    HEADER_BYTES_MAX,
    LENGTH,
    NONCE,
    OK,
    Credentials,
    Head,
    Protection,
    shown,
)
from holdfast.base.wire.link import Link, LinkCut, new_nonce
from holdfast.core.format.names import PACK_SUFFIX, is_link_name, is_pack_name
from holdfast.errors import CheckpointError, CorruptError, InvalidError, UnavailableError
from holdfast.settings import KIB
from holdfast.stored.peers.parity_files import PARITY_FILE, attempt_of

_log = logging.getLogger(__name__)

_PIECE_BYTES = 64 * KIB
"""Bytes of a small object that a connection hashes or stores at a time, in the memory of the header before."""

_PULLED = PACK_SUFFIX, f"/{PARITY_FILE}"
"""Ends of the keys of packs and parity, which no peer stores."""

_PAUSE_SECONDS = 0.1
"""Pause after a connection that could not be accepted, for example because there are too many open files."""

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})", re.ASCII)


class ServedFolder(Store, Protocol):
    """A store of files that lends open descriptors."""

    def opened(self, key: str) -> AbstractContextManager[tuple[int, int]]:
        """Lend the descriptor of an object, opened for reading, and the bytes of the object."""
        ...

    def put(self, key: str, data: bytes | Callable[[int], None], *, durable: bool = True) -> None:
        """Store a small object as any store does, also from a function that writes to an open hidden file."""
        ...

    def put_if_absent(self, key: str, data: bytes | Callable[[int], None], *, folders_durable: bool = True) -> None:
        """Do the same unless the key exists."""
        ...


class PeerServer:
    """Serves a folder from threads, one for each connection, until `close`."""

    def __init__(
        self,
        folder: ServedFolder,
        credentials: Credentials,
        host: str,
        port: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        protect: Callable[[Protection], int] | None = None,
    ) -> None:
        """Bind an address, and begin.

        Args:
            folder: The store to serve.
            credentials: Run and secret, which peers must have too.
            host: The address of this node that peers connect to.
            port: The port; 0 for a free one.
            limits: Limits of all peers together.
            protect: Keeps parity for the other nodes, and returns bytes of the parity.
        Raises:
            InvalidError: The address is not one of this node, is every address, or is in use.
        """
        self.folder, self.credentials, self.limits, self.protect = folder, credentials, limits, protect
        self.protecting = threading.Lock()
        """Held while parity is made."""
        for_pages = limits.buffer_bytes - limits.connections * HEADER_BYTES_MAX
        self.pages = threading.Semaphore(for_pages // framing.PAGE_BYTES_MAX)
        """Memory for the pages of names and the tasks that are under way at a time."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._conversations: dict[_Conversation, None] = {}
        self._listener = _bound(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """Address and port that peers connect to."""
        start_thread(threading.Thread(target=self._accept, name="holdfast-serve", daemon=True))

    def close(self) -> None:
        """Accept no more connections, and cut those that there are."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread that accepts.
                self._listener.close()
            for conversation in self._conversations:
                conversation.link.cut()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, place = self._listener.accept()
                with self._lock:
                    self._begin(connection, f"peer {place[0]}:{place[1]}")
            except (OSError, RuntimeError) as error:  # No descriptor, or no thread; or the listener was closed.
                _log.debug("%s:%s: could not accept a connection: %s", *self.address, error)
                self._closed.wait(_PAUSE_SECONDS)

    def _begin(self, connection: socket.socket, where: str) -> None:
        unproven = [each for each in self._conversations if not each.is_proven]
        if len(unproven) >= self.limits.unproven:
            self._cut(unproven[0])
        if len(self._conversations) >= self.limits.connections:
            idle = [each for each in self._conversations if each.is_proven and each.link.is_idle()]
            if not idle:
                connection.close()
                return
            self._cut(min(idle, key=lambda each: each.link.begun_seconds))
        conversation = _Conversation(self, Link(connection, AGENT, where))
        start_thread(threading.Thread(target=conversation.run, name="holdfast-peer", daemon=True))
        self._conversations[conversation] = None

    def _cut(self, conversation: _Conversation) -> None:
        conversation.link.cut()
        self._conversations.pop(conversation)

    def require_kept(self, conversation: _Conversation) -> None:
        """Refuse a request that came while its connection was cut: the peer may send the request again.

        Raises:
            LinkCut: The connection was cut.
        """
        with self._lock:
            if conversation not in self._conversations:
                raise LinkCut(f"{conversation.link.where}: was cut to make room")

    def leave(self, conversation: _Conversation) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._conversations.pop(conversation, None)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(address[0]).is_unspecified:
            raise InvalidError(f"agent: address {host!r} is every address of this node; expected the one for peers")
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InvalidError(
            f"agent: could not listen at {host}:{port} ({error.strerror}); expected a free port of an address of this "
            "node. Choose another, or end the process that listens there"
        ) from error


class _Conversation:
    """One connection, served by one thread."""

    def __init__(self, server: PeerServer, link: Link) -> None:
        self._server, self._folder, self.link = server, server.folder, link
        link.idle_seconds = server.limits.idle_seconds
        link.end_in(server.limits.proving_seconds)
        self.is_proven = False
        """Whether the peer has proven to know the secret."""
        self._identity = server.credentials.identity

    def run(self) -> None:
        """Answer requests until one end closes."""
        try:
            while self._answer():
                self.link.begin_next()
        except LinkCut as cut:
            _log.debug("%s", cut)
        finally:
            self.link.close()
            self._server.leave(self)

    def _answer(self) -> bool:
        """Answer one request; return whether another may follow."""
        line = ""
        try:
            head = self.link.receive_head()
            self._server.require_kept(self)
            line = head.line
            if self.link.session is None:
                self._greet(head)
            else:
                self._serve(head)
            return True
        except LinkCut:
            raise
        except CheckpointError as error:
            _log.debug("refused %s: %s", shown(line), error)
            self._refuse(line, error)
            return self.link.is_proven and self.link.owed_bytes == 0

    def _refuse(self, line: str, error: CheckpointError) -> None:
        fields = {}
        if not self.link.is_proven:
            self.link.session = None  # Nothing is proven to a peer that has proven nothing.
            fields = self._identity
        body = b"" if line.startswith("HEAD ") else shown(str(error)).encode()
        status = next((status for kind, status in framing.STATUS_OF.items() if isinstance(error, kind)), "503")
        self.link.send_head(Head(status, {**fields, LENGTH: str(len(body))}), more=bool(body))
        self.link.send(body)

    def _greet(self, head: Head) -> None:
        nonce = head.fields.get(NONCE, "")
        if head.line != framing.GREETING or len(nonce) != 2 * framing.NONCE_BYTES or head.body_bytes:
            raise InvalidError(f"request {shown(head.line)}; expected {framing.GREETING} with a nonce first")
        for name, expected in self._identity.items():
            if head.fields.get(name) != expected:
                raise InvalidError(f"{name}: found {shown(head.fields.get(name, ''))!r}; expected {expected!r}")
        own = new_nonce()
        self.link.session = framing.Session(self._server.credentials, nonce, own)
        self.link.send_head(Head(OK, {**self._identity, NONCE: own, LENGTH: "0"}))

    def _serve(self, head: Head) -> None:
        if not self.link.is_proven:
            raise InvalidError("proof of the header: found another; expected the one of this connection and number")
        self.is_proven = True
        self.link.end_in(math.inf)
        method, _, text = head.line.partition(" ")
        key, prefix, after = framing.target_in(text)
        if method not in ("PUT", "POST") and head.body_bytes:
            raise InvalidError(f"{method} with a body of {head.body_bytes} bytes; expected none")
        if method in ("GET", "HEAD") and key:
            self._send_object(method, key, head.fields.get(framing.RANGE))
        elif method == "GET":
            self._send_page(prefix, after)
        elif method == "PUT" and key:
            _require_small(method, key)
            self._store(key, head)
            self._send(b"")
        elif head.line in framing.TASKS:
            self._send(self._carry_out(head))
        else:
            expected = f"GET, HEAD or PUT of a key, GET of a prefix, {' or '.join(framing.TASKS)}"
            raise InvalidError(f"{shown(head.line)}; expected {expected}")

    def _send_object(self, method: str, key: str, text: str | None) -> None:
        with self._folder.opened(key) as (fd, count):
            start, stop = (0, count) if text is None else _range_in(text, key, count)
            fields, is_sent = {LENGTH: str(stop - start)}, method == "GET" and start < stop
            if method == "GET" and not key.endswith(_PULLED):  # The digests in the index prove chunks.
                fields[DIGEST] = _digest_of(fd, start, stop, key)
            self.link.send_head(Head(OK if text is None else framing.PARTIAL, fields), more=is_sent)
            if is_sent:
                self.link.send_file(fd, start, stop)

    def _send_page(self, prefix: str, after: str) -> None:
        with self._memory_for("a page of names"):
            entries = list(islice(self._folder.list(prefix, after=after), framing.PAGE_NAMES + 1))
            self._send(framing.encode_page(entries))

    def _send(self, data: bytes) -> None:
        """Answer with a proven body."""
        fields = {LENGTH: str(len(data)), DIGEST: hashlib.sha256(data).hexdigest()}
        self.link.send_head(Head(OK, fields), more=bool(data))
        self.link.send(data)

    @contextmanager
    def _memory_for(self, subject: str) -> Iterator[None]:
        seconds = self._server.limits.idle_seconds
        if not self._server.pages.acquire(timeout=seconds):
            raise UnavailableError(f"no memory for {subject} in {seconds:.0f} s; retry")
        try:
            self.link.end_in(seconds)  # Others wait for this memory.
            yield
        finally:
            self.link.end_in(math.inf)
            self._server.pages.release()

    def _carry_out(self, head: Head) -> bytes:
        """Receive a task and carry the task out; return the body of the answer."""
        if not 0 < head.body_bytes <= framing.PAGE_BYTES_MAX:
            expected = f"1 to {framing.PAGE_BYTES_MAX}"
            raise InvalidError(f"{head.line} with a body of {head.body_bytes} bytes; expected {expected}")
        with self._memory_for("a task"):
            body = bytearray(head.body_bytes)
            self.link.receive_into(memoryview(body))
            if hashlib.sha256(body).hexdigest() != head.fields.get(DIGEST):
                raise CorruptError(f"{head.line}: the bytes are not those that the header proves; send the task again")
            task = framing.decode_task(head.line, body)
            if isinstance(task, framing.Removal):
                self._folder.delete(task.keys)
                return b""
            if isinstance(task, framing.Move):
                _require_small(head.line, task.key)
                _require_small(head.line, task.new_key)
                self._folder.move(task.key, task.new_key)
                return b""
        return self._protect(task)

    def _protect(self, task: Protection) -> bytes:
        if self._server.protect is None:
            raise InvalidError(f"{task.LINE}: this agent makes no parity; expected an agent of a node with peers")
        for key in (f"{task.attempt}r00000{PACK_SUFFIX}", *(key for packs in task.packs.values() for key in packs)):
            if attempt_of(key) != task.attempt or not is_pack_name(key.removeprefix(task.attempt)):
                raise InvalidError(f"{task.LINE}: found {shown(key)!r}; expected packs of {shown(task.attempt)!r}")
        if not self._server.protecting.acquire(blocking=False):
            raise UnavailableError(f"{task.LINE}: the agent protects another attempt; retry")
        try:
            return msgspec.json.encode(self._server.protect(task))
        finally:
            self._server.protecting.release()

    def _store(self, key: str, head: Head) -> None:
        """Store a small object: received bytes go to a hidden file, which gets the name at the end."""
        condition = head.fields.get(framing.IF_NONE_MATCH)
        if condition not in (None, "*") or LENGTH not in head.fields or head.body_bytes > framing.SMALL_BYTES_MAX:
            expected = f"a Content-Length to {framing.SMALL_BYTES_MAX}, and If-None-Match: * or none"
            raise InvalidError(f"PUT of {key} with {shown(str(head.fields))}; expected {expected}")

        room = memoryview(bytearray(min(_PIECE_BYTES, head.body_bytes)))

        def receive(fd: int) -> None:
            summed, left = hashlib.sha256(), head.body_bytes
            is_here = self.link.owed_bytes < left  # The folder was removed meanwhile, and the store calls again.
            if is_here and left > len(room):
                raise UnavailableError(f"{key}: the folder was removed meanwhile; send the object again")
            while left:
                piece = room[:left]
                left -= len(piece)
                if not is_here:
                    self.link.receive_into(piece)
                summed.update(piece)
                while piece:
                    piece = piece[os.write(fd, piece) :]
            if summed.hexdigest() != head.fields.get(DIGEST):
                raise CorruptError(f"{key}: the bytes are not those that the header proves; send the object again")

        if condition:
            self._folder.put_if_absent(key, receive)
        else:
            self._folder.put(key, receive)


def _require_small(verb: str, key: str) -> None:
    if key.endswith(_PULLED) or is_link_name(key.rpartition("/")[2]):
        raise InvalidError(f"{verb} of the pack {key}; expected a small object: packs are pulled")


def _digest_of(fd: int, start: int, stop: int, key: str) -> str:
    summed, room = hashlib.sha256(), memoryview(bytearray(min(_PIECE_BYTES, stop - start)))
    while start < stop:
        count = os.preadv(fd, [room[: stop - start]], start)
        if not count:
            raise CorruptError(f"{key}: ended at {start} of {stop} bytes meanwhile")
        summed.update(room[:count])
        start += count
    return summed.hexdigest()


def _range_in(text: str, key: str, count: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    start, stop = (int(match[1]), int(match[2]) + 1) if match else (0, 0)
    if not start < stop <= count:
        raise CorruptError(
            f"{key}: {shown(text)} of {count} bytes; expected bytes=FIRST-LAST within. Read another copy"
        )
    return start, stop
