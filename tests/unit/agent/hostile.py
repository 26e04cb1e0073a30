"""Conversations of hostile peers, each with the refusal that must come: a status, or the end of the connection."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable

from holdfast.settings import MIB
from tests.unit.agent.conversing import NODE, PACK, RUN, Answer, Raw, put_fields

CLOSED = 0
BAD, MISSING, EXISTS, WRONG_BYTES = 400, 404, 412, 422
ATTEMPT = PACK.rpartition("/")[0]

Conversation = tuple[int, Callable[[Raw], Answer | None]]


def greeting(raw: Raw, more: str = "", *, line: str = "POST /session", version: str = "HTTP/1.1") -> bytes:
    names = f"holdfast-version: 1\r\nholdfast-run: {RUN}\r\nholdfast-node: {NODE}\r\n"
    fields = f"{names}holdfast-nonce: {os.urandom(32).hex()}\r\n"
    return f"{line} {version}\r\nhost: holdfast\r\n{fields}{more}\r\n".encode("latin-1")


def said(data: bytes | Callable[[Raw], bytes]) -> Callable[[Raw], Answer | None]:
    """Send bytes before anything is proven."""
    return lambda raw: raw.send(data(raw) if callable(data) else data).answer()


def dripped(raw: Raw) -> None:
    for byte in greeting(raw)[:20]:
        raw.send(bytes([byte]))
        time.sleep(0.1)
    return raw.answer()


def greeted(act: Callable[[Raw], Answer | None]) -> Callable[[Raw], Answer | None]:
    def converse(raw: Raw) -> Answer | None:
        answer = raw.greet()
        assert answer is not None and answer.status == 200
        return act(raw)

    return converse


def asked(line: str, body: bytes = b"", **fields: str) -> Callable[[Raw], Answer | None]:
    """Send a proven request."""
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return greeted(lambda raw: raw.ask(line, named, body))


def forged(
    line: str = "GET /small", *, role: str = "rank", number: int = 1, secret: bytes = b""
) -> Callable[[Raw], Answer | None]:
    def converse(raw: Raw) -> Answer | None:
        raw.greet(secret) if secret else raw.greet()
        return raw.send(raw.header(line, {"holdfast-proof": raw.proof(line, {}, number, role)})).answer()

    return converse


def changed(old: bytes, new: bytes, line: str = "GET /small", **fields: str) -> Callable[[Raw], Answer | None]:
    def act(raw: Raw) -> Answer | None:
        header = raw.proven(line, fields)
        assert header.count(old) == 1
        return raw.send(header.replace(old, new)).answer()

    return greeted(act)


def replayed(raw: Raw) -> Answer | None:
    header = raw.proven("GET /small")
    first = raw.send(header).answer()
    assert first is not None and first.status == 200
    return raw.send(header).answer()


def of_another_connection(raw: Raw) -> Answer | None:
    other = Raw(raw.socket.getpeername()[1])
    other.greet()
    header = other.proven("GET /small")
    other.socket.close()
    return raw.send(header).answer()


def reordered(raw: Raw) -> Answer | None:
    first, second = raw.proven("GET /small"), raw.proven("HEAD /small")
    answer = raw.send(second).answer()
    raw.send(first)
    return answer


def pipelined(raw: Raw) -> Answer | None:
    return raw.send(raw.proven("GET /small") + raw.proven("GET /small")).answer()


def short_body(raw: Raw) -> Answer | None:
    raw.send(raw.proven("PUT /short", put_fields(b"x" * 100)) + b"x" * 99)
    raw.socket.shutdown(1)
    return raw.answer()


def stuck_body(raw: Raw) -> Answer | None:
    return raw.send(raw.proven("PUT /stuck", put_fields(b"x" * 100)) + b"x" * 99).answer()


def long_body(raw: Raw) -> Answer | None:
    raw.send(raw.proven("PUT /long", put_fields(b"x" * 100_000)))
    time.sleep(0.1)
    raw.send(b"x" * 100_000 + b"and more\r\n\r\n")
    first = raw.answer()
    assert first is not None and first.status == 200
    return raw.answer()


def put(key: str, data: bytes = b"data", sent: bytes | None = None, **fields: str) -> Callable[[Raw], Answer | None]:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    wanted = {name: value for name, value in (put_fields(data) | named).items() if value}
    return greeted(lambda raw: raw.ask(f"PUT {key}", wanted, data if sent is None else sent))


def task(verb: str, body: object, **fields: str) -> Callable[[Raw], Answer | None]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    wanted = {"content-length": str(len(data)), "holdfast-digest": hashlib.sha256(data).hexdigest()}
    wanted |= {name.replace("_", "-"): value for name, value in fields.items()}
    wanted = {name: value for name, value in wanted.items() if value}
    return greeted(lambda raw: raw.ask(f"POST /{verb}", wanted, data))


def protection(attempt: str, packs: dict[str, int], **more: object) -> dict[str, object]:
    return {"attempt": attempt, "packs": {NODE: packs}, "bytes_per_second": None} | more


CONVERSATIONS: dict[str, Conversation] = {
    # Before the greeting.
    "says nothing": (CLOSED, lambda raw: raw.answer()),
    "half a header": (CLOSED, said(b"POST /session HTTP/1.1\r\nhost: h")),
    "a byte at a time": (CLOSED, dripped),
    "a line without an end": (WRONG_BYTES, said(b"GET /" + b"a" * 70000)),
    "fields without an end": (WRONG_BYTES, said(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000)),
    "a huge value": (WRONG_BYTES, said(lambda raw: greeting(raw, "range: " + "a" * 66000 + "\r\n"))),
    "random bytes": (WRONG_BYTES, said(b"\x80\x02\xff\x00" * 50 + b"\r\n\r\n")),
    "a hello of TLS": (WRONG_BYTES, said(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n")),
    "a pickle": (WRONG_BYTES, said(b"\x80\x04\x95\x1e\x00cposix\nsystem\n(S'true'\ntR.\r\n\r\n")),
    "HTTP/2": (WRONG_BYTES, said(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")),
    "HTTP/1.0": (WRONG_BYTES, said(lambda raw: greeting(raw, version="HTTP/1.0"))),
    "no host": (WRONG_BYTES, said(b"POST /session HTTP/1.1\r\nholdfast-version: 1\r\n\r\n")),
    "two hosts": (WRONG_BYTES, said(lambda raw: greeting(raw, "host: other\r\n"))),
    "a space in a name": (WRONG_BYTES, said(lambda raw: greeting(raw, "content-length : 5\r\n"))),
    "a zero byte in a value": (WRONG_BYTES, said(lambda raw: greeting(raw, "range: a\0b\r\n"))),
    "an unknown field": (WRONG_BYTES, said(lambda raw: greeting(raw, "x-forwarded-for: 127.0.0.1\r\n"))),
    "an upgrade": (WRONG_BYTES, said(lambda raw: greeting(raw, "connection: upgrade\r\nupgrade: h2c\r\n"))),
    "expects 100": (WRONG_BYTES, said(lambda raw: greeting(raw, "expect: 100-continue\r\n"))),
    "asks first": (BAD, said(lambda raw: greeting(raw, line="GET /small"))),
    "CONNECT first": (BAD, said(lambda raw: greeting(raw, line="CONNECT 10.0.0.1:22"))),
    "a greeting with a body": (BAD, said(lambda raw: greeting(raw, "content-length: 4\r\n") + b"data")),
    "a greeting without nonce": (BAD, lambda raw: raw.greet(nonce="")),
    "a short nonce": (BAD, lambda raw: raw.greet(nonce="00")),
    "another version": (BAD, lambda raw: raw.greet(version="2")),
    "another run": (BAD, lambda raw: raw.greet(run="run-8")),
    # Proofs.
    "no proof": (BAD, greeted(lambda raw: raw.send(raw.header("GET /small", {})).answer())),
    "greets twice": (BAD, greeted(lambda raw: raw.send(greeting(raw)).answer())),
    "another secret": (BAD, forged(secret=b"s" * 32)),
    "the proof of an agent": (BAD, forged(role="agent")),
    "number 0": (BAD, forged(number=0)),
    "number 2": (BAD, forged(number=2)),
    "replayed": (BAD, greeted(replayed)),
    "of another connection": (BAD, greeted(of_another_connection)),
    "reordered": (BAD, greeted(reordered)),
    "another target": (BAD, changed(b"/small", b"/other")),
    "another method": (BAD, changed(b"GET /small", b"PUT /small")),
    "another range": (BAD, changed(b"bytes=0-1", b"bytes=0-9", range="bytes=0-1")),
    "a field added": (BAD, changed(b"\r\n\r\n", b"\r\nrange: bytes=0-1\r\n\r\n")),
    "a field removed": (BAD, changed(b"range: bytes=0-1\r\n", b"", range="bytes=0-1")),
    "a proof cut short": (BAD, changed(b"\r\n\r\n", b"0\r\n\r\n")),
    "a proof twice": (WRONG_BYTES, changed(b"\r\n\r\n", b"\r\nholdfast-proof: 00\r\n\r\n")),
    # Framing behind a proof.
    "both lengths": (WRONG_BYTES, asked("PUT /x", content_length="4", transfer_encoding="chunked")),
    "chunked": (WRONG_BYTES, asked("PUT /x", b"4\r\ndata\r\n0\r\n\r\n", transfer_encoding="chunked")),
    "two lengths": (
        WRONG_BYTES,
        changed(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\n", "PUT /x", **{"content-length": "4"}),
    ),
    "a negative length": (WRONG_BYTES, asked("PUT /x", content_length="-4")),
    "a length with a sign": (WRONG_BYTES, asked("PUT /x", content_length="+4")),
    "a length of 30 digits": (WRONG_BYTES, asked("PUT /x", content_length="9" * 30)),
    "pipelined": (WRONG_BYTES, greeted(pipelined)),
    "GET with a body": (BAD, asked("GET /small", b"data", content_length="4")),
    # Paths.
    "above the folder": (BAD, asked("GET /../secret")),
    "above by a folder": (BAD, asked("GET /a/../../secret")),
    "above by percent": (BAD, asked("GET /%2e%2e/secret")),
    "two slashes": (BAD, asked("GET //etc/passwd")),
    "a whole URL": (BAD, asked("GET http://127.0.0.1/small")),
    "no slash": (BAD, asked("GET small")),
    "a star": (BAD, asked("GET *")),
    "a hidden file": (BAD, asked("GET /.hidden")),
    "a long key": (BAD, asked("GET /" + "a" * 2000)),
    "a backslash": (BAD, asked("GET /a\\..\\secret")),
    "a link": (BAD, asked("GET /link")),
    "below a link": (BAD, asked("GET /linked/secret")),
    "a pipe": (BAD, asked("GET /pipe")),
    "a folder": (MISSING, asked("GET /a")),
    "absent": (MISSING, asked("GET /absent")),
    "a query": (BAD, asked("GET /small?after=a")),
    # Ranges.
    "beyond the end": (WRONG_BYTES, asked("GET /small", range="bytes=0-5")),
    "begins beyond the end": (WRONG_BYTES, asked(f"GET /{PACK}", range=f"bytes={16 * MIB}-{16 * MIB}")),
    "a range of an exabyte": (WRONG_BYTES, asked(f"GET /{PACK}", range="bytes=0-999999999999999999")),
    "backwards": (WRONG_BYTES, asked("GET /small", range="bytes=3-1")),
    "a negative range": (WRONG_BYTES, asked("GET /small", range="bytes=-3")),
    "an open range": (WRONG_BYTES, asked("GET /small", range="bytes=1-")),
    "two ranges": (WRONG_BYTES, asked("GET /small", range="bytes=0-1,3-4")),
    "other units": (WRONG_BYTES, asked("GET /small", range="items=0-1")),
    "a number of 40 digits": (WRONG_BYTES, asked("GET /small", range="bytes=0-" + "9" * 40)),
    # Pages of names.
    "a token above": (BAD, asked("GET /a/?after=../secret")),
    "a made-up token": (BAD, asked("GET /?after=eyJwYWdlIjogMn0=")),
    "an empty token": (BAD, asked("GET /?after=")),
    "a page above": (BAD, asked("GET /../")),
    "a page of hidden names": (BAD, asked("GET /.hidden/")),
    "HEAD of a page": (BAD, asked("HEAD /a/")),
    # Objects that are stored.
    "PUT of a pack": (BAD, put(f"/{PACK.replace('r00000', 'r00001')}")),
    "PUT of a coded pack": (BAD, put(f"/{ATTEMPT}/coded/r00000.safetensors")),
    "PUT of any safetensors": (BAD, put("/model.safetensors")),
    "PUT of a link": (BAD, put(f"/{ATTEMPT}/step-000000000001.0123456789abcdef.r00000.link")),
    "PUT above": (BAD, put("/../x")),
    "PUT of a hidden file": (BAD, put("/.secret")),
    "PUT of a page": (BAD, put("/a/")),
    "PUT of some tag": (BAD, put("/new", if_none_match='"tag"')),
    "PUT of 257 MiB": (BAD, put("/large", sent=b"x" * MIB, content_length=str(257 * MIB))),
    "PUT without a length": (BAD, put("/new", content_length="", sent=b"")),
    "PUT of other bytes": (WRONG_BYTES, put("/new", sent=b"Data")),
    "PUT without a digest": (WRONG_BYTES, put("/new", holdfast_digest="")),
    "PUT that ends early": (CLOSED, greeted(short_body)),
    "PUT that stops": (CLOSED, greeted(stuck_body)),
    "PUT of more": (WRONG_BYTES, greeted(long_body)),
    "PUT of an object that exists": (EXISTS, put("/small")),
    "PUT of a folder": (EXISTS, put("/a")),
    "PUT below an object": (BAD, put("/small/x")),
    "PUT below a link": (BAD, put("/linked/x")),
    # Tasks.
    "a task that is no JSON": (BAD, task("remove", b"\x80\x04.")),
    "a task in bytes of no text": (BAD, task("remove", b'{"keys":["\xff"]}')),
    "a task of another type": (BAD, task("remove", b"[]")),
    "a task with more": (BAD, task("remove", {"keys": [], "all": True})),
    "a deep task": (BAD, task("remove", b"[" * 100_000)),
    "a task of nothing": (BAD, task("remove", b"")),
    "a task with another digest": (WRONG_BYTES, task("remove", {"keys": ["small"]}, holdfast_digest="00")),
    "a task without a digest": (WRONG_BYTES, task("remove", {"keys": ["small"]}, holdfast_digest="")),
    "a task that is too large": (BAD, task("remove", b"x", content_length=str(8 * MIB + 1))),
    "a task that ends early": (CLOSED, task("remove", b"{", content_length="2")),
    "removal of too many": (BAD, task("remove", {"keys": ["small"] * 4097})),
    "removal of millions": (BAD, task("remove", b'{"keys":[' + b'"",' * 2_700_000 + b'""]}')),
    "removal above": (BAD, task("remove", {"keys": ["small", "../secret"]})),
    "removal of a hidden file": (BAD, task("remove", {"keys": [".hidden"]})),
    "removal below a link": (BAD, task("remove", {"keys": ["linked/secret"]})),
    "a move above": (BAD, task("move", {"key": "small", "new_key": "../small"})),
    "a move from above": (BAD, task("move", {"key": "../secret", "new_key": "new"})),
    "a move of a pack": (BAD, task("move", {"key": PACK, "new_key": "new"})),
    "a move to a pack": (BAD, task("move", {"key": "small", "new_key": PACK})),
    "a move to parity": (BAD, task("move", {"key": "small", "new_key": "parity/step.0/xor"})),
    "a move to a link": (
        BAD,
        task("move", {"key": "small", "new_key": f"{ATTEMPT}/step-000000000001.0123456789abcdef.r00000.link"}),
    ),
    "a move of a link": (BAD, task("move", {"key": "link", "new_key": "new"})),
    "a move of a folder": (MISSING, task("move", {"key": "a", "new_key": "b"})),
    "a move of nothing": (MISSING, task("move", {"key": "absent", "new_key": "new"})),
    "protection of no attempt": (BAD, task("protect", protection("parity/x/", {}))),
    "protection above": (BAD, task("protect", protection("../../", {}))),
    "protection of another attempt": (BAD, task("protect", protection(f"{ATTEMPT}/", {PACK.replace("7", "8"): 1}))),
    "protection of a small object": (BAD, task("protect", protection(f"{ATTEMPT}/", {f"{ATTEMPT}/overview": 1}))),
    "protection of a negative pack": (BAD, task("protect", protection(f"{ATTEMPT}/", {PACK: -1}))),
    "protection of a huge pack": (BAD, task("protect", protection(f"{ATTEMPT}/", {PACK: 1 << 64}))),
    "protection of too many packs": (
        BAD,
        task("protect", protection(f"{ATTEMPT}/", {f"{number:06}": 1 for number in range(600_000)})),
    ),
    "protection at a stop": (BAD, task("protect", protection(f"{ATTEMPT}/", {PACK: 1}, bytes_per_second=0))),
    "an unknown task": (BAD, task("status", {})),
    "POST": (BAD, asked("POST /status")),
    "DELETE": (BAD, asked("DELETE /small")),
    "PATCH": (BAD, asked("PATCH /small")),
    "TRACE": (BAD, asked("TRACE /small")),
}
