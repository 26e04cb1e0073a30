"""The client of an agent: bits flipped on the way, agents that lie, and agents that say nothing."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.wire.framing import PAGE_NAMES, Credentials, Exchange, Head, Session
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import Settings

CREDENTIALS = Credentials("run-7", bytes(range(32)), "n3")
FLIPS = 300


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Serve each connection by a function, one after the other."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    serve(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


class Flipping:
    """Stands between both ends, and flips one bit of the bytes to the rank, or of those to the agent."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address, self.bit, self.is_to_rank, self.passed_bytes = address, -1, True, [0, 0]
        self.flips_left = 1 << 30

    def __call__(self, rank: socket.socket) -> None:
        with socket.create_connection(self.address) as agent:
            self.passed_bytes = [0, 0]
            other = threading.Thread(target=self._carry, args=(rank, agent, False), daemon=True)
            other.start()
            self._carry(agent, rank, True)
            other.join(10)

    def _carry(self, source: socket.socket, target: socket.socket, is_to_rank: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                at = self.bit // 8 - self.passed_bytes[is_to_rank]
                if is_to_rank == self.is_to_rank and 0 <= at < len(data) and self.flips_left:
                    data[at] ^= 1 << self.bit % 8
                    self.flips_left -= 1
                self.passed_bytes[is_to_rank] += len(data)
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run", settings=Settings())


def test_a_flipped_bit_of_an_answer_is_found_wherever_it_is(store: LocalStore) -> None:
    content, chance = os.urandom(300), random.Random(7)
    store.put("small", content)
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        flipping = Flipping(server.address)
        with listening(flipping) as address:
            with closing(Peer(address, CREDENTIALS, 10)) as peer:
                assert bytes(peer.get("small", 300)) == content
            answer_bytes = flipping.passed_bytes[True]
            found = {}
            for flipping.bit in sorted(chance.sample(range(8 * answer_bytes), FLIPS)):
                with closing(Peer(address, CREDENTIALS, 0.3)) as peer:
                    try:
                        got = bytes(peer.get("small", 300))
                    except (UnavailableError, CorruptError, InvalidError) as error:
                        assert str(error).startswith("node n3 ("), error
                        found[flipping.bit] = type(error)
                    else:
                        assert got == content, flipping.bit
    in_body = [bit for bit in found if bit >= 8 * (answer_bytes - 300)]
    assert len(in_body) > 50 and {found[bit] for bit in in_body} == {CorruptError}
    # Spaces, letters of either case and the text of a status mean the same to both ends.
    assert len(found) > 0.9 * FLIPS


def test_a_flipped_bit_of_a_request_stores_nothing_else(store: LocalStore) -> None:
    content, chance = os.urandom(300), random.Random(8)
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        flipping = Flipping(server.address)
        flipping.is_to_rank = False
        with listening(flipping) as address:
            for flipping.bit in (-1, *sorted(chance.sample(range(8 * 850), FLIPS // 3))):
                with closing(Peer(address, CREDENTIALS, 0.3)) as peer:
                    try:
                        peer.put_if_absent("small", content)
                    except CheckpointError as error:
                        assert str(error).startswith("node n3 ("), error
                        assert not list(store.list())
                    else:
                        assert [(entry.key, entry.bytes) for entry in store.list()] == [("small", 300)]
                        assert store.get("small", 300) == content
                        store.delete(["small"])


@pytest.mark.parametrize("is_to_rank", [True, False])
def test_a_small_body_that_changed_is_asked_for_once_more(store: LocalStore, is_to_rank: bool) -> None:
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        flipping = Flipping(server.address)
        flipping.is_to_rank, flipping.flips_left = is_to_rank, 0
        with listening(flipping) as address:
            for flips_left in range(3):
                with closing(Peer(address, CREDENTIALS, 5)) as peer:
                    content = os.urandom(300)
                    call = partial(peer.get, "small", 300) if is_to_rank else partial(peer.put, "small", content)
                    store.put("small", content if is_to_rank else b"before")
                    flipping.flips_left = flips_left
                    if flips_left == 2:
                        with pytest.raises(CorruptError, match="node n3"):
                            call()
                        assert store.get("small", 300) == (content if is_to_rank else b"before")
                    else:
                        assert call() in (content, None)
                        assert store.get("small", 300) == content
                    assert not flipping.flips_left
                flipping.bit = 8 * (flipping.passed_bytes[is_to_rank] - 1)  # Of the last byte of the body.


def test_a_body_of_a_pack_that_changed_is_left_to_the_index(store: LocalStore) -> None:
    store.put("step/r00000.safetensors", bytes(300))
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        flipping, found = Flipping(server.address), []
        with listening(flipping) as address:
            for _ in range(2):
                with closing(Peer(address, CREDENTIALS, 5)) as peer:
                    memory = bytearray(300)
                    peer.read_into("step/r00000.safetensors", [(0, 300)], [memoryview(memory)])
                    found.append(bytes(memory))
                flipping.bit = 8 * (flipping.passed_bytes[True] - 1)
    assert found == [bytes(300), bytes(299) + b"\1"]


def lying(
    answers: list[tuple[Head, bytes]],
    *,
    number_off: int = 0,
    role: str = "agent",
    greeting: Head | None = None,
    hangs: bool = False,
) -> Callable[[socket.socket], None]:
    """Return an agent that knows the secret, answers with these headers and bodies, and then closes or hangs."""

    def serve(connection: socket.socket) -> None:
        session = None
        for number, (head, body) in enumerate([(greeting or Head("200", {}), b""), *answers]):
            exchange, request = Exchange("agent"), None
            while request is None:
                data = connection.recv(1 << 16)
                if not data:
                    return
                request = exchange.receive(data)
            fields = dict(head.fields)
            if number == 0 and greeting is None:
                fields = {"holdfast-version": "1", "holdfast-run": CREDENTIALS.run, "holdfast-nonce": "ab" * 32}
                session = Session(CREDENTIALS, request.fields["holdfast-nonce"], "ab" * 32)
            fields = {"content-length": str(len(body))} | fields
            if session is not None:
                off = number_off if number else 0
                fields["holdfast-proof"] = session.proof(
                    role if number else "agent", number + off, Head(head.line, fields)
                )
            connection.sendall(exchange.send(Head(head.line, fields)) + body)
        connection.recv(1)
        while hangs and connection.recv(1 << 16):
            pass

    return serve


def asked(serve: Callable[[socket.socket], None], call: Callable[[Peer], object], seconds: float = 5) -> object:
    with listening(serve) as address, closing(Peer(address, CREDENTIALS, seconds)) as peer:
        return call(peer)


def test_an_unproven_answer_is_not_taken_for_absent() -> None:
    absent = [(Head("404", {}), b"absent")]
    with pytest.raises(MissingError):
        asked(lying(absent), lambda peer: peer.size("x"))
    for wrong in ({"number_off": 1}, {"number_off": -1}, {"role": "rank"}):
        with pytest.raises(UnavailableError, match="answer 404 without a proof of this connection"):
            asked(lying(absent, **wrong), lambda peer: peer.size("x"))


@pytest.mark.parametrize(
    "serve",
    [
        lambda connection: time.sleep(0.4),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n") or time.sleep(0.4),
        lambda connection: None,
        lambda connection: connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000),
    ],
)
def test_what_is_no_agent_is_unavailable_in_time(serve: Callable[[socket.socket], None]) -> None:
    begun = time.monotonic()
    with pytest.raises((UnavailableError, InvalidError), match="node n3"):
        asked(serve, lambda peer: peer.size("x"), 0.2)
    assert time.monotonic() - begun < 3


def test_an_agent_that_stops_within_a_body_is_unavailable() -> None:
    answers = [(Head("206", {"content-length": "10"}), b"12345")]
    with pytest.raises(UnavailableError, match=r"node n3 .*did not answer in time"):
        asked(lying(answers), lambda peer: peer.read_into("x", [(0, 10)], [memoryview(bytearray(10))]), 0.4)


def test_a_body_of_another_length_is_corrupt() -> None:
    for body, expected in ((b"123456789", "more"), (b"12345678901", "10")):
        with pytest.raises(CorruptError, match=f"{len(body)} bytes; expected {expected}"):
            asked(
                lying([(Head("206", {}), body)]),
                lambda peer: peer.read_into("x", [(0, 10)], [memoryview(bytearray(10))]),
            )
    with pytest.raises(CorruptError, match="expected at most 10"):
        asked(lying([(Head("200", {"content-length": str(1 << 60)}), b"")]), lambda peer: peer.get("x", 10))


@pytest.mark.parametrize("body", [b"", b"x", b'"7"', b"1.5", b"[]"])
def test_parity_without_a_count_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptError, match=r"node n3 .*POST /protect: .*expected bytes of parity"):
        asked(lying([(Head("200", {}), body)]), lambda peer: peer.protect("step/attempt/", {}, None, 5))


def test_an_agent_of_another_version_is_named() -> None:
    other = Head("400", {"holdfast-version": "2", "holdfast-run": CREDENTIALS.run})
    with pytest.raises(InvalidError, match=r"node n3 \(.*\): the agent has another version: found 2; expected 1"):
        asked(lying([], greeting=other), lambda peer: peer.size("x"))


def test_a_silent_node_is_not_asked_again_for_twice_as_long_as_it_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.backends.stores.peers.silence._SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = Peer(listener.getsockname(), CREDENTIALS, 0.2)
        for pause_seconds in (0.0, 0.0, 0.5):
            time.sleep(pause_seconds)
            with pytest.raises(UnavailableError, match=r"node n3 \(.*: did not answer in time"):
                peer.size("x")
        listener.setblocking(False)
        for _ in range(2):
            listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_node_that_was_silent_greets_soon_or_is_waited_for_no_more(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_SECONDS", 0.0), ("_SECONDS_MAX", 0.2), ("_GREETING_SECONDS", 0.1)):
        monkeypatch.setattr(f"holdfast.backends.stores.peers.silence.{name}", value)
    store.put("small", b"12345")
    is_hung = threading.Event()
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        forward = Flipping(server.address)

        def serve(connection: socket.socket) -> None:
            if is_hung.is_set():
                while connection.recv(1 << 16):
                    pass
            else:
                forward(connection)

        with listening(serve) as address, closing(Peer(address, CREDENTIALS, 1.0)) as peer:
            is_hung.set()
            waits = []
            for _ in range(3):
                begun = time.monotonic()
                with pytest.raises(UnavailableError, match=r"node n3 \(.*: did not answer in time"):
                    peer.size("small")
                waits.append(time.monotonic() - begun)
                time.sleep(0.3)
            assert waits[0] > 0.9 and max(waits[1:]) < 0.9, waits
            is_hung.clear()
            monkeypatch.setattr("holdfast.backends.stores.peers.silence._GREETING_SECONDS", 60.0)
            assert peer.size("small") == 5, "a node that answers again is asked again"


def test_an_agent_whose_work_took_too_long_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.backends.stores.peers.silence._SECONDS", 0.0)
    connections, hang = [], lying([], hangs=True)

    def serve(connection: socket.socket) -> None:
        connections.append(connection.fileno())
        hang(connection)

    with listening(serve) as address, closing(Peer(address, CREDENTIALS, 30.0)) as peer:
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"node n3 \(.*: did not answer in time"):
                peer.protect("step/attempt/", {}, None, 0.3)
    assert len(connections) == 3


def test_a_greeting_takes_its_time_from_the_deadline_of_the_call(store: LocalStore) -> None:
    hang = lying([], hangs=True)

    def serve(connection: socket.socket) -> None:
        time.sleep(0.8)
        hang(connection)

    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=r"node n3 \(.*: did not answer in time"):
        asked(serve, lambda peer: peer.size("x"), 1.0)
    assert 0.9 < time.monotonic() - begun < 1.7


def test_calls_that_fail_together_note_one_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.backends.stores.peers.silence._SECONDS", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, closing(Peer(listener.getsockname(), CREDENTIALS, 0.4)) as peer:

        def ask() -> None:
            with pytest.raises(UnavailableError, match="did not answer in time"):
                peer.size("x")

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        time.sleep(1.0)  # Twice the wait, and less than ten times.
        begun = time.monotonic()
        ask()
        assert time.monotonic() - begun > 0.3, "the node is asked again"


def test_a_node_that_closes_a_connection_is_asked_again_at_once() -> None:
    connections = []
    with listening(lambda connection: connections.append(connection.fileno())) as address:
        peer = Peer(address, CREDENTIALS, 5)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="node n3"):
                peer.size("x")
    assert len(connections) == 2 * 6, "a few times in each call"


def test_a_node_that_takes_no_connection_is_waited_for_only_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.base.wire.link._CONNECT_SECONDS_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, closing(socket.socket()) as waiting:
        waiting.connect(listener.getsockname())  # The kernel drops the packets of others.
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=r"node n3 \(.*does not answer \(timed out\)"):
            Peer(listener.getsockname(), CREDENTIALS, 60).size("x")
        assert time.monotonic() - begun < 30


def page_of(*entries: object, more: str = "false") -> bytes:
    return f'{{"entries":{json.dumps(entries)},"has_more":{more}}}'.encode()


PAGES = {
    "no JSON": b"\x80\x04.",
    "another type": b"[]",
    "another field": page_of().replace(b"}", b',"x":1}'),
    "no entries": b'{"has_more":false}',
    "a name above": page_of(("a/../b", 1)),
    "a hidden name": page_of(("a/.x", 1)),
    "a name of another prefix": page_of(("b/x", 1)),
    "a name before": page_of(("a/a", 1)),
    "the name of the question": page_of(("a/b", 1)),
    "names out of order": page_of(("a/z", 1), ("a/y", 1)),
    "a name twice": page_of(("a/z", 1), ("a/z", 1)),
    "a name without a size": page_of(("a/x", 1), ("a/y",)),
    "a name with more": page_of(("a/x", 1, 1)),
    "a negative size": page_of(("a/x", -1)),
    "a size of a float": page_of(("a/x", 1.5)),
    "a size of 200 bits": page_of(("a/x", 1 << 200)),
    "more of nothing": page_of(more="true"),
    "too many names": page_of(*((f"a/x{number:05d}", 0) for number in range(PAGE_NAMES + 1))),
    "deep": b"[" * 100_000,
}


def test_a_page_is_taken_as_it_is() -> None:
    pages = [(Head("200", {}), page_of(("a/c", 3), more="true")), (Head("200", {}), page_of(("a/d", 1 << 40)))]
    found = asked(lying(pages), lambda peer: list(peer.list("a/", after="a/b")))
    assert found == [StoreEntry("a/c", 3), StoreEntry("a/d", 1 << 40)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_no_answer_is_refused(name: str) -> None:
    with pytest.raises(CorruptError, match=r"node n3 .*page of names"):
        asked(lying([(Head("200", {}), PAGES[name])]), lambda peer: list(peer.list("a/", after="a/b")))
