"""The client of one agent: each call is one request, over a connection that is kept for the next call."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice

import msgspec

from holdfast.backends.stores.peers.silence import Silence
from holdfast.base.clock import SystemClock
from holdfast.base.ports.keys import split_key, split_prefix
from holdfast.base.ports.ranges import check_ranges, runs_of
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange, StoreEntry
from holdfast.base.ports.store import Store
from holdfast.base.ports.temporary import TemporaryError
from holdfast.base.wire import framing
from holdfast.base.wire.framing import DIGEST, LENGTH, NONCE, OK, SMALL_BYTES_MAX, Credentials, Head, shown
from holdfast.base.wire.link import Link, LinkCut, LinkSilent, new_nonce
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from holdfast.settings import MIB

_LAST_WORD_SECONDS = 1.0
"""Wait for the answer of an agent that takes no more of a request: the agent may have said the reason."""

_KEPT_MAX = 8
"""Most connections that wait for the next call."""

_PAUSES_SECONDS = 0.0, 0.05, 0.1, 0.2, 0.4
"""Pauses after a connection that the agent closed without an answer: for a moment the agent has too many."""

_REMOVE = framing.Removal.LINE

_CLOCK = SystemClock()

_ERROR_OF = {status: kind for kind, status in framing.STATUS_OF.items()}


class _UnansweredError(LinkCut):
    """The agent closed the connection before an answer."""


_BULK_BYTES = 8 * MIB
"""Most bytes of a request for several ranges."""

Room = Iterator[memoryview] | int
"""Memory for the parts of a body, each taken once the one before is filled; or the most bytes of the body."""


class Peer(Store):
    """The folder of one node, through the agent of the node. A thread has a connection of its own during a call.

    A call raises `MissingError` only if the agent says that the key does not exist. An agent that does not answer
    before the deadline is `TemporaryError`, a kind of `UnavailableError`; so are calls at once after that. No silent
    node is asked again: another node has the object, or parity of the pack, and answers sooner. An agent with too many
    connections closes some, and is asked once more.
    """

    def __init__(self, address: tuple[str, int], credentials: Credentials, timeout_seconds: float) -> None:
        """Set the place; does no I/O.

        Args:
            address: Address and port of the agent.
            credentials: Run, secret and node, which the agent must have too.
            timeout_seconds: The deadline of each call, from the beginning of the call.
        """
        self.url = f"node {credentials.node} ({address[0]}:{address[1]})"
        """The node, for messages."""
        self._address, self._credentials, self._timeout_seconds = address, credentials, timeout_seconds
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._kept: list[Link] = []
        self._silence = Silence()

    def size(self, key: str) -> int:
        """Return the bytes of an object."""
        split_key(key)
        return self._ask(f"HEAD /{key}", OK)[0].body_bytes

    def get(self, key: str, bytes_max: int) -> bytes:
        """Return a small object whole and proven.

        Raises:
            MissingError: No such key.
            CorruptError: The object is larger than `bytes_max`, or the bytes are not those that the agent sent.
        """
        split_key(key)
        return bytes(self._ask(f"GET /{key}", OK, room=bytes_max)[1])

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        """Read byte ranges of one object, neighbours by one request. The bytes of packs are not proven."""
        runs = runs_of(ranges, _BULK_BYTES)
        # The agent itself looks whether one run is within the object.
        is_one = len(runs) == 1 and ranges[0][0] < ranges[-1][1]
        check_ranges(f"{self.url}/{key}", ranges[-1][1] if is_one else self.size(key), ranges, buffers)

        def rooms(numbers: range) -> Iterator[memoryview]:
            for number in numbers:
                if (buffer := buffers[number]).nbytes:  # An empty one cannot be cast.
                    yield buffer.cast("B") if (buffer.format, buffer.ndim) != ("B", 1) else buffer
                if on_range is not None:
                    on_range(number, buffer)

        for first, last in runs:
            start, stop, taken = ranges[first][0], ranges[last - 1][1], rooms(range(first, last))
            if start == stop:
                assert not [*taken], "no bytes"
                continue
            try:
                self._ask(f"GET /{key}", framing.PARTIAL, {framing.RANGE: f"bytes={start}-{stop - 1}"}, room=taken)
            except CorruptError:
                if last - first > 1:
                    check_ranges(f"{self.url}/{key}", self.size(key), ranges, buffers)  # Names the range at fault.
                raise

    def list(self, prefix: str = "", *, after: str = "", up_to: str | None = None) -> Iterator[StoreEntry]:
        """Yield every object whose key starts with `prefix`, behind `after`, in order; a page at a time."""
        split_prefix(prefix)
        return self._pages(prefix, after, up_to)

    def _pages(self, prefix: str, after: str, up_to: str | None) -> Iterator[StoreEntry]:
        has_more, last = True, after.rstrip("/")  # A caller may pass a folder; an agent is asked by keys.
        while has_more:
            target = f"/{prefix}?after={last}" if last else f"/{prefix}"
            page = self._ask(f"GET {target}", OK, room=framing.PAGE_BYTES_MAX)[1]
            entries, has_more = framing.decode_page(page, prefix, last, self.url)
            for entry in entries:
                if up_to is not None and entry.key > up_to:
                    return
                if entry.key > after:
                    yield entry
            last = entries[-1].key if has_more else ""

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store a small object whole, replacing an older one; durable on return.

        Raises:
            InvalidError: The key is that of a pack, or too large: no node stores a pack for another.
        """
        self._put(key, data, {})

    def put_if_absent(self, key: str, data: bytes, *, folders_durable: bool = True) -> None:
        """Store a small object unless the key exists; durable on return.

        Raises:
            ConflictError: The key exists; the object was not touched.
            InvalidError: As `put`.
        """
        self._put(key, data, {framing.IF_NONE_MATCH: "*"})

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, many by a request; an absent key is no error."""
        left = iter(keys)
        while batch := [*islice(left, framing.PAGE_NAMES)]:
            self._carry_out(framing.Removal(batch))

    def move(self, key: str, new_key: str) -> None:
        """Give a small object another key.

        Raises:
            InvalidError: A key is that of a pack.
        """
        self._carry_out(framing.Move(key, new_key))

    def protect(
        self, attempt: str, packs: Mapping[str, Mapping[str, int]], bytes_per_second: float | None, seconds: float
    ) -> int:
        """Let the agent keep the parity of an attempt for the other nodes of the group; return bytes of the parity.

        Args:
            attempt: The prefix of the attempt, whose manifest is published.
            packs: Bytes of the packs of each node by key; nodes in the order of the group.
            bytes_per_second: Most bytes that the agent reads a second; None for as many as there come.
            seconds: The deadline of this call.
        Raises:
            UnavailableError: A node does not answer or has other packs, the agent has no room, or is not done in time.
            InvalidError: These are no packs of the attempt, or the agent makes no parity.
        """
        task = framing.Protection(attempt, {node: {**of_node} for node, of_node in packs.items()}, bytes_per_second)
        answer = self._carry_out(task, seconds)
        try:
            return msgspec.json.decode(answer, type=int)
        except msgspec.DecodeError as error:
            raise CorruptError(f"{self.url}: {task.LINE}: {shown(str(error))}; expected bytes of parity") from error

    def _carry_out(self, task: framing.Task, seconds: float | None = None) -> memoryview:
        data = msgspec.json.encode(task)
        return self._ask(task.LINE, OK, _proof_of(data), data, framing.HEADER_BYTES_MAX, seconds=seconds)[1]

    def _put(self, key: str, data: bytes, fields: dict[str, str]) -> None:
        split_key(key)
        if len(data) > SMALL_BYTES_MAX:
            raise InvalidError(f"{self.url}: {key} has {len(data)} bytes; expected at most {SMALL_BYTES_MAX}")
        self._ask(f"PUT /{key}", OK, fields | _proof_of(data), data)

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for link in kept:
            link.close()

    def __del__(self) -> None:
        """Close the connections: no user of a store closes it."""
        for link in self._kept:  # No other thread is left, and a lock may be held at the end of Python.
            link.close()

    def _ask(
        self,
        line: str,
        expected: str,
        fields: dict[str, str] | None = None,
        data: bytes = b"",
        room: Room = 0,
        *,
        seconds: float | None = None,
    ) -> tuple[Head, memoryview]:
        """Send a request; return the header and the body of its answer.

        A small body that changed on the way is asked for once more, or sent once more. Bodies of packs are not. A
        request without an answer, since the agent closed the connection, is sent again if its effect is the same.

        Args:
            line: Method and target.
            expected: The status of an answer that is no error.
            fields: Further fields of the request.
            data: The body of the request.
            room: Where the body of the answer goes, or the most bytes that the body may have.
            seconds: The deadline of the request; None for that of each call.
        """
        method, is_conditional = line.partition(" ")[0], framing.IF_NONE_MATCH in (fields or {})
        may_repeat = method in ("GET", "HEAD") or (method == "PUT" and not is_conditional) or line == _REMOVE
        once = partial(self._ask_once, line, expected, fields or {}, data, room, seconds)
        with self._silence.noted(is_work=seconds is not None):
            for pause in _PAUSES_SECONDS:
                try:
                    return once()
                except _UnansweredError as cut:
                    if cut.may_take_effect and not may_repeat:
                        raise
                    _CLOCK.sleep(pause)
                except CorruptError:  # An agent that refuses the body of a request has stored nothing.
                    if not isinstance(room, int):
                        raise
                    return once()
            return once()

    def _ask_once(
        self, line: str, expected: str, fields: dict[str, str], data: bytes, room: Room, seconds: float | None
    ) -> tuple[Head, memoryview]:
        link, is_kept = self._kept_link() or self._connected(), False
        try:
            link.begin_next()
            if seconds is not None:
                link.end_in(seconds)
            answer = self._answer_to(link, Head(line, fields), data)
            if not link.is_proven:
                raise self._unproven(f"answer {answer.line} without a proof of this connection")
            if line.startswith("HEAD "):
                link.owed_bytes = 0
            if answer.line != expected:
                error = self._refusal(link, answer, line)
                is_kept = not data and not link.owed_bytes  # An agent that has not taken a body closes.
                raise error
            body = self._body(link, answer, line, room)
            is_kept = True
        finally:
            if is_kept:
                with self._lock:
                    kept = [*self._kept, link]
                    self._kept = [each for each in kept if each.is_fresh()][-_KEPT_MAX:]
                    stale = [each for each in kept if each not in self._kept]
            for each in stale if is_kept else [link]:
                each.close()
        return answer, body

    def _answer_to(self, link: Link, head: Head, data: bytes = b"") -> Head:
        try:
            link.send_head(head, more=bool(data))
            try:
                link.send(data)
            except LinkCut:
                link.end_in(_LAST_WORD_SECONDS)
            return link.receive_head()
        except LinkSilent:
            raise
        except LinkCut as cut:
            raise _UnansweredError(str(cut), may_take_effect=True) from cut
        except CorruptError as error:
            raise self._unproven(str(error)) from error

    def _unproven(self, found: str) -> TemporaryError:
        why = "another machine sent it, or a byte changed on the way"
        return TemporaryError(f"{self.url}: {found}; {why}. Retry", may_take_effect=True)

    def _body(self, link: Link, answer: Head, line: str, room: Room) -> memoryview:
        """Receive a body; return the last part of it."""
        count, summed, part = link.owed_bytes, hashlib.sha256(), memoryview(b"")
        if isinstance(room, int):
            if count > room:
                raise CorruptError(f"{self.url}: {line}: {count} bytes; expected at most {room}. Read another copy")
            room = iter([memoryview(bytearray(count))])
        for part in room:
            if len(part) > link.owed_bytes:
                raise CorruptError(f"{self.url}: {line}: {count} bytes; expected more. Read another copy")
            link.receive_into(part)
            if DIGEST in answer.fields:
                summed.update(part)
        if link.owed_bytes:
            raise CorruptError(
                f"{self.url}: {line}: {count} bytes; expected {count - link.owed_bytes}. Read another copy"
            )
        if DIGEST in answer.fields and count and summed.hexdigest() != answer.fields[DIGEST]:
            raise CorruptError(f"{self.url}: {line}: the bytes are not those that the agent sent. Read another copy")
        return part

    def _refusal(self, link: Link, answer: Head, line: str) -> CheckpointError:
        """Return the error that an answer is."""
        room = memoryview(bytearray(min(link.owed_bytes, framing.HEADER_BYTES_MAX)))
        link.receive_into(room)
        text = shown(bytes(room).decode("utf-8", "replace")) or f"refused, status {answer.line}"
        if answer.line in _ERROR_OF:
            return _ERROR_OF[answer.line](f"{self.url}: {line}: {text}")
        # The agent may have stored the object, and failed after that.
        return TemporaryError(f"{self.url}: {line}: {text}", may_take_effect=True)

    def _connected(self) -> Link:
        """Return a new connection to an agent that has the same version, run, node and secret.

        Raises:
            InvalidError: The agent has another one.
        """
        seconds, begun_seconds = self._timeout_seconds, _CLOCK.monotonic_seconds()
        link = Link.connected(self._address, self.url, self._silence.greeting_seconds(seconds))
        try:
            own, ours = new_nonce(), self._credentials.identity
            answer = self._answer_to(link, Head(framing.GREETING, ours | {NONCE: own}))
            for name, expected in ours.items():
                if (found := shown(answer.fields.get(name, expected))) != expected:
                    raise self._stranger(name.removeprefix("holdfast-"), found, expected)
            if answer.line != OK:
                raise self._unproven(f"answer {answer.line} to the greeting")
            link.session = framing.Session(self._credentials, own, answer.fields.get(NONCE, ""))
            if not link.session.is_proven(framing.AGENT, 0, answer):
                raise self._stranger("secret", "a proof that does not fit", "that of HOLDFAST_SECRET_FILE")
        except CheckpointError as error:
            link.close()
            if isinstance(error, _UnansweredError):
                error.may_take_effect = False  # The agent has seen no request.
            raise
        link.end_in(begun_seconds + seconds - _CLOCK.monotonic_seconds())
        return link

    def _stranger(self, what: str, found: str, expected: str) -> InvalidError:
        text = f"the agent has another {what}: found {found}; expected {expected}. Start an agent of this run there"
        return InvalidError(f"{self.url}: {text}")

    def _kept_link(self) -> Link | None:
        """Return a connection that still stands, if one is kept."""
        if self._pid != os.getpid():  # The connections and the lock are those of the process that forked this one.
            self._lock = threading.Lock()
            self.close()
            self._pid = os.getpid()
        while True:
            with self._lock:
                if not self._kept or self._silence:
                    return None
                link = self._kept.pop()
            if link.is_fresh():
                link.end_in(self._timeout_seconds)
                return link
            link.close()


def _proof_of(data: bytes) -> dict[str, str]:
    return {LENGTH: str(len(data)), DIGEST: hashlib.sha256(data).hexdigest()}
