"""Each limit of an agent, with a peer that goes beyond it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from holdfast.agent.limits import Limits
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.ports.temporary import TemporaryError
from holdfast.base.wire.framing import (
    HEADER_BYTES_MAX,
    PAGE_BYTES_MAX,
    PAGE_NAMES,
    SMALL_BYTES_MAX,
    Credentials,
    encode_page,
)
from holdfast.errors import InvalidError, UnavailableError
from holdfast.settings import KIB, MIB, Settings
from tests.unit.agent.conversing import NODE, PACK, RUN, SECRET, AgentProcess, Raw, agent_process, put_fields

CREDENTIALS = Credentials(RUN, SECRET, NODE)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run", settings=Settings())
    store.put("small", b"small")
    return store


def honest(port: int, seconds: float = 10) -> float:
    """Read as an honest peer; return the seconds."""
    begun = time.monotonic()
    with closing(Peer(("127.0.0.1", port), CREDENTIALS, seconds)) as peer:
        assert bytes(peer.get("small", 5)) == b"small"
    return time.monotonic() - begun


def test_the_limits_are_those_of_the_design() -> None:
    limits = Limits()
    assert (HEADER_BYTES_MAX, SMALL_BYTES_MAX, PAGE_NAMES) == (64 * KIB, 256 * MIB, 4096)
    assert (limits.connections, limits.unproven, limits.buffer_bytes) == (512, 64, 64 * MIB)
    assert (limits.proving_seconds, limits.idle_seconds) == (5, 30)
    # The headers of all connections and the pages that there is memory for make up the budget.
    assert limits.connections * HEADER_BYTES_MAX + 4 * PAGE_BYTES_MAX == limits.buffer_bytes


def test_a_page_of_the_longest_names_has_its_memory() -> None:
    entries = [StoreEntry(f"{number:04d}" + "/x" * 510, 1 << 62) for number in range(PAGE_NAMES + 1)]
    page = len(encode_page(entries))
    names = sum(sys.getsizeof(entry) + sys.getsizeof(entry.key) for entry in entries)
    assert page + names < PAGE_BYTES_MAX + 2 * MIB


@pytest.mark.parametrize(
    ("count", "why"), [(HEADER_BYTES_MAX, "with a nonce first"), (HEADER_BYTES_MAX + 1, "more than 65536 bytes")]
)
def test_a_header_has_at_most_64_kib(store: LocalStore, count: int, why: str) -> None:
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        raw = Raw(server.address[1])
        header = raw.header("GET /small", {"range": ""})
        answer = raw.send(header.replace(b"range: ", b"range: " + b"x" * (count - len(header)))).answer()
        assert answer is not None and why in answer.body.decode()
        raw.socket.close()


@pytest.mark.parametrize("count", [SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1])
def test_a_small_object_has_at_most_256_mib(store: LocalStore, count: int) -> None:
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=Limits(idle_seconds=0.3))) as server:
        raw = Raw(server.address[1])
        raw.greet()
        answer = raw.ask("PUT /large", put_fields(b"", **{"content-length": str(count)}), b"x")
        if count > SMALL_BYTES_MAX:
            assert answer is not None and answer.status == 400 and b"Content-Length to 268435456" in answer.body
        else:
            assert answer is None, "the agent waits for the rest, then closes"
        raw.socket.close()
        with pytest.raises(InvalidError, match="268435457 bytes; expected at most 268435456"):
            Peer(server.address, CREDENTIALS, 10).put_if_absent("large", bytes(SMALL_BYTES_MAX + 1))
    assert [entry.key for entry in store.list()] == ["small"]
    assert not [name for name in os.listdir(store.url) if name.startswith(".tmp-")]


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        Path(name, "small").write_bytes(b"small")
        with agent_process(Path(name), 5, 30) as agent:
            honest(agent.port)
            yield agent


def test_of_many_unproven_connections_the_oldest_are_cut(agent: AgentProcess) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(Raw(agent.port).socket)) for _ in range(64 + 36)]
        assert honest(agent.port) < 1
        time.sleep(0.1)
        ended = [is_ended(connection) for connection in connections]
        assert ended == [True] * 37 + [False] * 63, "one more is cut for the honest peer"


def is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_512_connections_with_requests_have_room_and_one_more_does_not(agent: AgentProcess) -> None:
    time.sleep(0.2)  # The connections of other tests end.
    before = agent.forget_peak()
    with ExitStack() as stack:
        raws = []
        for _ in range(512):
            raws.append(Raw(agent.port))
            stack.callback(raws[-1].socket.close)
            answer = raws[-1].greet()
            assert answer is not None and answer.status == 200
            answer = raws[-1].ask("GET /small")
            assert answer is not None and answer.body == b"small"
        for raw in raws:  # Each holds as much of a header as it may.
            raw.send(b"GET /small HTTP/1.1\r\nrange: " + b"x" * (63 * KIB))
        with pytest.raises(UnavailableError, match="node n3"):
            honest(agent.port)
        time.sleep(0.2)
        assert agent.memory_bytes("VmHWM") - before <= 64 * MIB
    for _ in range(100):  # The agent ends the threads of the connections.
        time.sleep(0.1)
        with suppress(UnavailableError):
            honest(agent.port)
            break
    else:
        pytest.fail("the connections that were closed still count")


def test_a_connection_is_closed_after_so_long_without_a_byte(store: LocalStore) -> None:
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=Limits(idle_seconds=0.4))) as server:
        raw = Raw(server.address[1])
        raw.greet()
        for _ in range(3):
            time.sleep(0.2)
            assert raw.ask("HEAD /small") is not None
        begun = time.monotonic()
        assert raw.is_closed(5)
        assert 0.3 < time.monotonic() - begun < 2
        raw.socket.close()


def test_a_peer_that_takes_no_answer_is_cut(store: LocalStore) -> None:
    store.put(PACK, bytes(16 * MIB))
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=Limits(idle_seconds=0.2))) as server:
        raw = Raw(server.address[1])
        raw.greet()
        begun = time.monotonic()
        raw.send(raw.proven(f"GET /{PACK}", {"range": f"bytes=0-{16 * MIB - 1}"}))
        with server._lock:  # The agent notes a connection after the thread of the connection has begun.
            pass
        while server._conversations and time.monotonic() - begun < 10:
            time.sleep(0.02)
        # The kernel begins the wait anew for some parts of a file that it has begun to send.
        assert 0.2 < time.monotonic() - begun < 5
        count = 0
        while data := raw.socket.recv(MIB):
            count += len(data)
        assert count < 16 * MIB
        raw.socket.close()


def test_more_peers_than_connections_take_turns(store: LocalStore) -> None:
    limits = Limits(connections=4, unproven=2)
    with ExitStack() as stack:
        server = stack.enter_context(closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=limits)))
        peers = [stack.enter_context(closing(Peer(server.address, CREDENTIALS, 10))) for _ in range(12)]
        for turn in range(3):
            for number, peer in enumerate(peers):
                peer.put(f"rank-{number}", b"%d" % turn)
        with ThreadPoolExecutor(12) as threads:  # All at once, as the ranks of a job do.
            for number, found in enumerate(threads.map(lambda peer: bytes(peer.get("small", 5)), peers)):
                assert found == b"small", number
        assert all(bytes(store.get(f"rank-{number}", 9)) == b"2" for number in range(12))


def test_a_request_under_way_is_not_cut_for_another_peer(store: LocalStore) -> None:
    with ExitStack() as stack:
        limits = Limits(connections=2)
        server = stack.enter_context(closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=limits)))
        busy, idle = Raw(server.address[1]), Raw(server.address[1])
        for raw in (busy, idle):
            stack.callback(raw.socket.close)
            raw.greet()
            raw.ask("GET /small")
        header = busy.send(b"").proven("GET /small")
        await_busy(server, 0)  # The agent waits for requests a moment after its answers have come.
        busy.send(header[:9])
        await_busy(server, 1)
        honest(server.address[1])
        assert is_ended(idle.socket)
        answer = busy.send(header[9:]).answer()
        assert answer is not None and answer.body == b"small"


def await_busy(server: PeerServer, count: int) -> None:
    for _ in range(1000):
        # Bytes that the kernel has handed over, and the thread has not noted, are seen by no other thread.
        if sum(each.link._has_head for each in [*server._conversations]) == count:
            return
        time.sleep(0.01)
    pytest.fail(f"never {count} requests under way")


def test_a_request_whose_connection_is_cut_is_sent_again_if_that_is_safe(store: LocalStore) -> None:
    """The agent cuts the connection when the request is there: the client has seen a connection that stands."""
    server = CuttingServer(store, CREDENTIALS, "127.0.0.1")
    with closing(server), closing(Peer(server.address, CREDENTIALS, 10)) as peer:
        assert peer.size("small") == 5
        for call in (
            lambda: peer.get("small", 5),
            lambda: peer.size("small"),
            lambda: peer.put("other", b"1"),
            lambda: peer.delete(["other"]),
        ):
            server.cuts = 1
            call()
            assert server.cuts == 0
        server.cuts = 1
        with pytest.raises(TemporaryError, match="closed the connection"):
            peer.put_if_absent("new", b"1")
        peer.put_if_absent("new", b"1")


class CuttingServer(PeerServer):
    """Cuts a connection when a request has come on it."""

    cuts = 0

    def require_kept(self, conversation: Any) -> None:
        if self.cuts and conversation.is_proven:
            self.cuts -= 1
            with self._lock:
                self._cut(conversation)
        super().require_kept(conversation)


def test_an_unproven_connection_ends_in_time_whatever_it_sends(store: LocalStore) -> None:
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=Limits(proving_seconds=0.5))) as server:
        begun, raw = time.monotonic(), Raw(server.address[1])
        raw.greet()
        while time.monotonic() - begun < 5 and not is_ended(raw.socket):
            raw.socket.setblocking(True)
            raw.send(b"G")
            time.sleep(0.05)
        assert 0.4 < time.monotonic() - begun < 2
        raw.socket.close()


def test_pages_and_tasks_wait_for_memory_and_no_longer_than_for_a_byte(store: LocalStore) -> None:
    limits = Limits(connections=8, idle_seconds=0.5, buffer_bytes=8 * HEADER_BYTES_MAX + PAGE_BYTES_MAX)
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=limits)) as server, \
            closing(Peer(server.address, CREDENTIALS, 10)) as peer:  # fmt: skip
        assert [entry.key for entry in peer.list()] == ["small"]
        server.pages.acquire()  # As another connection would, that sends its page.
        assert bytes(peer.get("small", 5)) == b"small", "only pages and tasks wait"
        with pytest.raises(UnavailableError, match="no memory for a page of names"):
            list(peer.list())
        with pytest.raises(UnavailableError, match="no memory for a task"):
            peer.delete(["small"])
        server.pages.release()
        assert [entry.key for entry in peer.list()] == ["small"]


def test_both_ends_give_up_without_an_acknowledgement(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = socket.socket.setsockopt
    monkeypatch.setattr("socket.socket.setsockopt", lambda *args: (seen.append(args[2:]), whole(*args))[1])
    with closing(PeerServer(store, CREDENTIALS, "127.0.0.1")) as server:
        honest(server.address[1])
    assert seen.count((socket.TCP_USER_TIMEOUT, 10_000)) == 2


_CUT_LINK = """
import subprocess, sys, threading, time
import holdfast.base.wire.link as link
link.USER_TIMEOUT_SECONDS = 1
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.wire.framing import Credentials
from holdfast.errors import UnavailableError
from holdfast.settings import Settings
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = PeerServer(LocalStore(sys.argv[1], settings=Settings()), Credentials("r", b"s", "n1"), "127.0.0.1")
peer, buffer = Peer(server.address, Credentials("r", b"s", "n1"), 3), memoryview(bytearray(16 << 20))
peer.read_into(sys.argv[2], [(0, len(buffer))], [buffer])
send_file = link.Link.send_file
def cut(*args):
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    send_file(*args)
link.Link.send_file = cut
try:
    peer.read_into(sys.argv[2], [(0, len(buffer))], [buffer])
except UnavailableError as error:
    print(error)
begun = time.monotonic()
while server._conversations and time.monotonic() - begun < 20:
    time.sleep(0.05)
print("ended" if not server._conversations else "still there")
"""


def test_a_pulled_link_ends_the_call_and_the_connection(store: LocalStore) -> None:
    alone = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("ip") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network of their own")
    store.put(PACK, bytes(16 * MIB))
    command = [*alone, sys.executable, "-c", _CUT_LINK, store.url, PACK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("node n1 (127.0.0.1:") and first.endswith("did not answer in time")
    assert second == "ended"
