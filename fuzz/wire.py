"""Fuzzes the wire between nodes: headers of both roles, targets of requests, tasks, and pages of names."""

from __future__ import annotations

import msgspec

from holdfast.base.ports.readable import StoreEntry
from holdfast.base.wire.framing import (
    AGENT,
    HEADER_BYTES_MAX,
    RANK,
    TASKS,
    Credentials,
    Exchange,
    Head,
    Move,
    Protection,
    Removal,
    Session,
    decode_page,
    decode_task,
    encode_page,
    target_in,
)
from holdfast.errors import CorruptError, InvalidError

_SESSION = Session(Credentials("run", b"secret", "n1"), "00", "01")


def header(data: bytes) -> None:
    """The bytes of a peer, first as a request and then as an answer: a header that is taken comes back when sent."""
    for receiver, sender in ((AGENT, RANK), (RANK, AGENT)):
        exchange = Exchange(receiver)
        try:
            head = exchange.receive(data)
        except CorruptError as error:
            assert str(error).isprintable()
            continue
        if head is None:
            continue
        assert 0 <= head.body_bytes < 10**20
        assert len(exchange.rest) < len(data) <= HEADER_BYTES_MAX
        assert not _SESSION.is_proven(sender, 1, head)
        assert Exchange(receiver).receive(Exchange(sender).send(head)) == head
        if receiver == AGENT:
            target(head.line.partition(" ")[2].encode())


def target(data: bytes) -> None:
    """The target of a request: no key or prefix leads out of the folder."""
    try:
        key, prefix, after = target_in(data.decode("latin-1"))
    except InvalidError as error:
        assert str(error).isprintable()
        return
    assert not (key and (prefix or after))
    for text in (key, prefix.removesuffix("/"), after):
        assert not text or not _leads_out(text)


def task(data: bytes) -> None:
    """The body of each task: no key leads out of the folder."""
    for line in TASKS:
        try:
            found = decode_task(line, data)
        except InvalidError as error:
            assert str(error).isprintable()
            continue
        if isinstance(found, Protection):
            assert all(size >= 0 for packs in found.packs.values() for size in packs.values())
        else:
            keys = found.keys if isinstance(found, Removal) else (found.key, found.new_key)
            assert not any(map(_leads_out, keys))
        assert decode_task(line, msgspec.json.encode(found)) == found


def _leads_out(text: str) -> bool:
    return any(part.startswith(".") or not part for part in text.split("/"))


def page(data: bytes) -> None:
    """The JSON of a page of names under `a/`, behind `a/b`."""
    try:
        entries, has_more = decode_page(data, "a/", "a/b", "here")
    except CorruptError as error:
        assert str(error).isprintable()
        return
    assert all(entry.key.startswith("a/") and entry.key > "a/b" and entry.bytes >= 0 for entry in entries)
    assert entries or not has_more
    again = encode_page(entries)
    assert decode_page(again, "a/", "a/b", "here") == (entries, False)


def seeds(name: str) -> list[bytes]:
    """Return the seeds of a target."""
    if name == "wire-page":
        entries = [StoreEntry("a/c", 3), StoreEntry("a/c/d", 1 << 40), StoreEntry("a/e", 0)]
        return [encode_page(entries), encode_page([]), encode_page(entries).replace(b"false", b"true")]
    if name == "wire-task":
        packs = {"n1": {"a": 1 << 40, "b": 0}, "n2": {}}
        tasks = Removal(["a/b", "c"]), Removal([]), Move("a/b", "c"), Protection("a/", packs, 1e9)
        return [*map(msgspec.json.encode, tasks), b'{"keys":["../a"]}', b'{"key":"a","new_key":"b/.c"}']
    if name == "wire-target":
        return [b"/", b"/a/?after=a/b", b"/step-000000000001/manifest.json", b"/../a", b"/a/%2e%2e/"]
    put = {"if-none-match": "*", "content-length": "4", "holdfast-digest": "00"}
    heads = (
        Head("GET /a", {"range": "bytes=0-3"}),
        Head("PUT /a", put),
        Head("POST /session", {"holdfast-run": "run"}),
    )
    answers = (Head("200", {"content-length": "4"}), Head("404", {"content-length": "0"}))
    sent = [Exchange(RANK).send(_proven(RANK, head)) for head in heads]
    return [*sent, *(Exchange(AGENT).send(_proven(AGENT, head)) for head in answers), sent[1] + b"data"]


def _proven(role: str, head: Head) -> Head:
    return Head(head.line, head.fields | {"holdfast-proof": _SESSION.proof(role, 2, head)})
