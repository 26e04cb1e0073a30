"""Headers of the wire, proofs of headers, tasks and pages of names: bytes in, values out; no socket is known here."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from holdfast.base.ports.keys import is_key, split_key, split_prefix
from holdfast.base.ports.readable import StoreEntry
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, printable
from holdfast.settings import KIB, MIB

try:
    import h11
except ImportError as error:
    raise InvalidError("peers need the package h11, which is not installed: pip install 'holdfast[agent]'") from error

VERSION = "1"
"""Version of the wire. Both ends must have the same one."""

HEADER_BYTES_MAX = 64 * KIB
SMALL_BYTES_MAX = 256 * MIB
"""Largest object that is stored over the wire."""

PAGE_NAMES = 4096
PAGE_BYTES_MAX = 8 * MIB
"""More than a page of the longest names takes; most bytes of a task."""

_TASK_NAMES_MAX = 2 * PAGE_NAMES
"""Most names in a task. In memory a short name takes many times the bytes of the JSON."""

NONCE_BYTES = 32

RANK, AGENT = "rank", "agent"
"""The roles: the end that asks, and the end that answers."""

GREETING, OK, PARTIAL = "POST /session", "200", "206"
LENGTH, RANGE, IF_NONE_MATCH, PROOF = "content-length", "range", "if-none-match", "holdfast-proof"
DIGEST, NONCE, WIRE_VERSION, RUN, NODE = (f"holdfast-{name}" for name in ("digest", "nonce", "version", "run", "node"))
_FIELDS = {"host", LENGTH, RANGE, IF_NONE_MATCH, PROOF, DIGEST, NONCE, WIRE_VERSION, RUN, NODE}
"""All fields that a header may have. Anything that changes the framing, such as `transfer-encoding`, is refused."""

_Errors = dict[type[CheckpointError], str]
STATUS_OF: _Errors = {InvalidError: "400", MissingError: "404", ConflictError: "412", CorruptError: "422"}
"""The status of each error; 503 of any other. The body is the message."""

_MESSAGE_CHARACTERS_MAX = 1000


def shown(text: str) -> str:
    """Return a text of the other end for a message."""
    return printable(text[:_MESSAGE_CHARACTERS_MAX])


class Head(NamedTuple):
    """The header of a request or an answer."""

    line: str
    """Method and target with a space between, or the status."""

    fields: dict[str, str]
    """Values by name, in the order of the wire; names in lower case."""

    @property
    def body_bytes(self) -> int:
        """The length of the body."""
        return int(self.fields.get(LENGTH, "0"))


class Exchange:
    """Frames one request and the answer at one end. Bodies pass outside."""

    def __init__(self, role: str) -> None:
        """Begin; the role is the one of this end."""
        self._h11 = h11.Connection(h11.CLIENT if role == RANK else h11.SERVER, HEADER_BYTES_MAX)

    def send(self, head: Head) -> bytes:
        """Return the bytes of a header of this end."""
        fields, event = list(head.fields.items()), None
        if self._h11.our_role is h11.CLIENT:
            method, target = head.line.split(" ")
            event = h11.Request(method=method, target=target, headers=[("host", "holdfast"), *fields])
        return self._h11.send(event or h11.Response(status_code=int(head.line), headers=fields)) or b""

    def receive(self, data: bytes) -> Head | None:
        """Take bytes of the other end; return the header once whole.

        Raises:
            CorruptError: This is no header of the wire.
        """
        try:
            self._h11.receive_data(data)
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                return None
            if not isinstance(event, h11.Request | h11.Response) or event.http_version != b"1.1":
                raise CorruptError("header: of another kind or version; expected a request or an answer of HTTP/1.1")
            fields = {name.decode("ascii"): value.decode("ascii") for name, value in event.headers}
        except (h11.RemoteProtocolError, UnicodeDecodeError) as error:
            raise CorruptError(f"header: {shown(str(error))}; expected HTTP/1.1") from error
        required = "host" if isinstance(event, h11.Request) else LENGTH
        if len(fields) < len(event.headers) or not {required} <= fields.keys() <= _FIELDS:
            expected = f"{required}, and each once of {', '.join(sorted(_FIELDS))}"
            raise CorruptError(f"header: fields {shown(', '.join(fields))}; expected {expected}")
        if isinstance(event, h11.Response):
            return Head(str(event.status_code), fields)
        fields.pop("host")
        return Head(f"{event.method.decode('ascii')} {event.target.decode('ascii')}", fields)

    @property
    def rest(self) -> bytes:
        """The bytes of the other end behind the header."""
        return self._h11.trailing_data[0]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The knowledge that both ends must share."""

    run: str
    """Identity of the run."""

    secret: bytes = field(repr=False)
    """Secret of the run. Nothing shows or sends the secret."""

    node: str
    """Name of the node whose folder is served. Two keepers behind one address would count a copy twice."""

    @property
    def identity(self) -> dict[str, str]:
        """The fields of a greeting that name version, run and node."""
        return {WIRE_VERSION: VERSION, RUN: self.run, NODE: self.node}


class Session:
    """The key of one connection, which proves every header with role and number.

    The greeting brings the nonce of the rank and has no proof. The answer to the greeting has number 0, the next
    request and the answer to that have number 1. So a header that is replayed, moved, reflected or sent over another
    connection is not proven.
    """

    def __init__(self, credentials: Credentials, rank_nonce: str, agent_nonce: str) -> None:
        """Derive the key from the secret, version, run, node and the nonces of both ends."""
        text = "\n".join(("holdfast", *credentials.identity.values(), rank_nonce, agent_nonce))
        self._key = hmac.digest(credentials.secret, text.encode(), "sha256")

    def proof(self, role: str, number: int, head: Head) -> str:
        """Return the proof of a header, from all that the header has but the proof."""
        fields = (f"{name}: {value}" for name, value in head.fields.items() if name != PROOF)
        return hmac.digest(self._key, "\n".join((role, str(number), head.line, *fields)).encode(), "sha256").hex()

    def is_proven(self, role: str, number: int, head: Head) -> bool:
        """Return whether a header has the proof of this role and number."""
        given = head.fields.get(PROOF, "").encode()
        return hmac.compare_digest(given, self.proof(role, number, head).encode())


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entries: Annotated[list[tuple[str, _Size]], msgspec.Meta(max_length=PAGE_NAMES)]
    """Names with sizes."""
    has_more: bool


def encode_page(entries: list[StoreEntry]) -> bytes:
    """Return the JSON of at most `PAGE_NAMES` entries; one more says that there are more."""
    page = [(entry.key, entry.bytes) for entry in entries[:PAGE_NAMES]]
    return msgspec.json.encode(_Page(page, len(entries) > PAGE_NAMES))


def decode_page(data: bytes | memoryview, prefix: str, after: str, where: str) -> tuple[list[StoreEntry], bool]:
    """Return the entries of a page, and whether there are more.

    Args:
        data: The JSON.
        prefix, after: The question: names that start with `prefix`, behind `after`.
        where: The other end, for messages.
    Raises:
        CorruptError: The page is no answer to the question.
    """
    where = f"{where}: page of names"
    try:
        page = msgspec.json.decode(data, type=_Page)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError(f"{where}: {shown(str(error))}; expected entries and has_more") from error
    for before, name in pairwise([after, *(name for name, _ in page.entries)]):
        if name <= before or not name.startswith(prefix) or not is_key(name, split_key):
            raise CorruptError(f"{where}: {shown(name)!r}; expected a key behind {before!r} with {prefix!r} first")
    if page.has_more and not page.entries:
        raise CorruptError(f"{where}: no name, and more to come; expected at least one name")
    return [StoreEntry(name, size) for name, size in page.entries], page.has_more


class Removal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task to remove objects of the folder."""

    LINE: ClassVar = "POST /remove"

    keys: Annotated[list[str], msgspec.Meta(max_length=PAGE_NAMES)]
    """Keys of the objects. An absent key is no error."""

    def __post_init__(self) -> None:
        """Check the keys."""
        for key in self.keys:
            split_key(key)


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task to give a small object of the folder another key."""

    LINE: ClassVar = "POST /move"

    key: str
    """The key now."""

    new_key: str
    """The key from then on."""

    def __post_init__(self) -> None:
        """Check the keys."""
        split_key(self.key)
        split_key(self.new_key)


class Protection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task to keep the parity of an attempt for the other nodes of the group. The answer is bytes of the parity."""

    LINE: ClassVar = "POST /protect"

    attempt: str
    """The prefix of the attempt."""

    packs: dict[str, dict[str, _Size]]
    """Bytes of the packs of each node by key; nodes in the order of the group."""

    bytes_per_second: Annotated[float, msgspec.Meta(gt=0)] | None
    """Most bytes that the agent reads a second; None for as many as there come."""


Task = Removal | Move | Protection
TASKS: dict[str, type[Task]] = {kind.LINE: kind for kind in (Removal, Move, Protection)}
"""The tasks that an agent carries out, by method and target of the request. The body is the task in JSON."""


def decode_task(line: str, data: bytes | bytearray) -> Task:
    """Return the task of a request in `TASKS`.

    Raises:
        InvalidError: The body is no such task.
    """
    if (names := data.count(b'"') // 2) > _TASK_NAMES_MAX:
        raise InvalidError(f"{line}: {names} names; expected at most {_TASK_NAMES_MAX}")
    try:
        return msgspec.json.decode(data, type=TASKS[line])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidError(f"{line}: {shown(str(error))}; expected the task in JSON") from error


def target_in(text: str) -> tuple[str, str, str]:
    """Return the key that a target names; or no key, and the prefix of a page and the name that the page is behind.

    Raises:
        InvalidError: The target is neither.
    """
    path, mark, after = text[1:].partition("?after=")
    if not text.startswith("/"):
        raise InvalidError(f"target {shown(text)!r}: expected / and a key or a prefix")
    if path and not path.endswith("/"):
        split_key(path + mark + after)
        return path, "", ""
    split_prefix(path)
    if mark:
        split_key(after)
    return "", path, after
