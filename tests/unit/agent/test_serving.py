"""An agent and its client over real sockets: each verb, each error, and both ends that do not belong together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from holdfast.agent.limits import Limits
from holdfast.agent.serving import PeerServer
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.peers.peer import Peer
from holdfast.base.ports.readable import StoreEntry
from holdfast.base.wire.framing import PAGE_NAMES, Credentials, Protection
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.settings import MIB, Settings
from tests.unit.agent.conversing import NODE, PACK, RUN, SECRET, Raw, put_fields

CREDENTIALS = Credentials(RUN, SECRET, NODE)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run", settings=Settings())


@pytest.fixture
def server(store: LocalStore) -> Iterator[PeerServer]:
    server = PeerServer(store, CREDENTIALS, "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def peer(server: PeerServer) -> Iterator[Peer]:
    peer = Peer(server.address, CREDENTIALS, 10)
    yield peer
    peer.close()


def test_a_pack_is_read_by_ranges_into_the_memory_of_the_caller(store: LocalStore, peer: Peer) -> None:
    content = os.urandom(9 * MIB + 5)
    store.put(PACK, content)
    assert peer.size(PACK) == len(content)
    memory = bytearray(len(content))
    for start, stop in ((0, 1), (7, 8 * MIB), (8 * MIB, len(content)), (1, 7)):
        peer.read_into(PACK, [(start, stop)], [memoryview(memory)[start:stop]])
    assert memory == content
    with pytest.raises(CorruptError, match=r"node n3 .*bytes=9437188-9437189 of 9437189 bytes"):
        peer.read_into(PACK, [(len(content) - 1, len(content) + 1)], [memoryview(bytearray(2))])


@pytest.mark.parametrize("count", [0, 1, 65536, 65537, 3 * MIB])
def test_a_small_object_goes_there_and_comes_back(store: LocalStore, peer: Peer, count: int) -> None:
    content = os.urandom(count)
    peer.put_if_absent("epochs/000000000001.json", content)
    assert store.get("epochs/000000000001.json", count) == content == bytes(peer.get("epochs/000000000001.json", count))
    with pytest.raises(ConflictError, match="another writer stored it"):
        peer.put_if_absent("epochs/000000000001.json", b"other")
    assert store.get("epochs/000000000001.json", count) == content
    peer.delete(["epochs/000000000001.json"])
    peer.delete(["epochs/000000000001.json"])
    for call in (
        peer.size,
        lambda key: peer.get(key, 9),
        lambda key: peer.read_into(key, [(0, 1)], [memoryview(bytearray(1))]),
    ):
        with pytest.raises(MissingError, match=r"node n3 \(127\.0\.0\.1:\d+\)"):
            call("epochs/000000000001.json")
    assert not list(store.list())


def test_a_larger_object_than_expected_is_not_taken(store: LocalStore, peer: Peer) -> None:
    store.put("latest", b"12345")
    with pytest.raises(CorruptError, match="5 bytes; expected at most 4"):
        peer.get("latest", 4)
    assert bytes(peer.get("latest", 5)) == b"12345"


@pytest.mark.parametrize(("count", "status"), [(10, 200), (65_536, 200), (65_537, 503)])
def test_a_larger_object_whose_folder_goes_meanwhile_is_to_be_sent_again(
    store: LocalStore, server: PeerServer, count: int, status: int
) -> None:
    raw, content = Raw(server.address[1]), os.urandom(count)
    raw.greet()
    raw.send(raw.proven("PUT /folder/new", put_fields(content)) + content[:-5])
    for _ in range(200):
        if os.path.isdir(f"{store.url}/folder") and os.listdir(f"{store.url}/folder"):
            break
        time.sleep(0.01)
    store.delete(["folder/other"])
    assert not os.path.exists(f"{store.url}/folder")
    answer = raw.send(content[-5:]).answer()
    assert answer is not None and answer.status == status
    if status == 503:
        assert b"send the object again" in answer.body
        answer = raw.ask("PUT /folder/new", put_fields(content), content)
        assert answer is not None and answer.status == 200
    assert store.get("folder/new", count) == content
    raw.socket.close()


def test_the_agent_proves_nothing_to_a_peer_that_has_proven_nothing(server: PeerServer) -> None:
    """A request that a flipped bit changed is refused without a proof, so the rank tries again."""
    raw = Raw(server.address[1])
    greeting = raw.greet()
    assert greeting is not None and "holdfast-proof" in greeting.fields
    answer = raw.send(raw.proven("GET /small").replace(b"/small", b"/smell")).answer()
    assert answer is not None and answer.status == 400 and "holdfast-proof" not in answer.fields
    raw.socket.close()


def test_many_threads_share_a_peer(store: LocalStore, server: PeerServer, peer: Peer) -> None:
    content = os.urandom(MIB)
    store.put(PACK, content)

    def read(number: int) -> bool:
        memory, start = memoryview(bytearray(100_000)), number * 7_919
        peer.read_into(PACK, [(start, start + len(memory))], [memory])
        return memory == content[start : start + 100_000]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(100)))
    assert len(server._conversations) <= 8


def test_no_pack_is_stored(store: LocalStore, peer: Peer) -> None:
    store.put(PACK, b"pack")
    for put in (peer.put_if_absent, peer.put):
        with pytest.raises(InvalidError, match=r"of the pack .*packs are pulled"):
            put("step-000000000008/0123456789abcdef/r00000.safetensors", b"")
    assert [entry.key for entry in store.list()] == [PACK]
    peer.delete([PACK])
    assert not [*store.list()], "the rank that collects a step removes the packs on every node"


def test_an_attempt_is_removed_by_a_request(store: LocalStore, server: PeerServer, peer: Peer) -> None:
    keys = [f"step-000000000007/{number:05d}" for number in range(PAGE_NAMES + 1)]
    store.put("kept", b"")
    for key in (keys[0], keys[PAGE_NAMES - 1], keys[PAGE_NAMES]):
        store.put(key, b"")
    peer.size("kept")
    (link,) = peer._kept
    before = link._number
    peer.delete(iter(keys))
    assert [entry.key for entry in store.list()] == ["kept"]
    assert link._number == before + 2, "4,096 keys by the first request, one by the second"


def test_a_small_object_moves_by_one_call_of_the_folder(store: LocalStore, peer: Peer) -> None:
    store.put("removed/manifest", b"old")
    store.put("step/manifest", b"new")
    before = store.identity("step/manifest")
    peer.move("step/manifest", "removed/manifest")
    assert [entry.key for entry in store.list()] == ["removed/manifest"]
    assert store.identity("removed/manifest") == before, "no copy"
    with pytest.raises(MissingError, match=r"node n3 .*absent"):
        peer.move("absent", "new")
    store.put(PACK, b"pack")
    for keys in ((PACK, "small"), ("removed/manifest", PACK)):
        with pytest.raises(InvalidError, match=r"POST /move of the pack .*packs are pulled"):
            peer.move(*keys)


PROTECTION = (f"{PACK.rpartition('/')[0]}/", {"n4": {PACK: 1 << 40}, NODE: {}}, 2.5e9)


def test_an_agent_may_protect_for_longer_than_any_other_wait(store: LocalStore) -> None:
    asked, is_over = [], threading.Event()

    def protect(task: Protection) -> int:
        asked.append(task)
        is_over.wait(10)
        return 1 << 40

    limits = Limits(idle_seconds=0.2)
    with (
        closing(PeerServer(store, CREDENTIALS, "127.0.0.1", limits=limits, protect=protect)) as server,
        closing(Peer(server.address, CREDENTIALS, 0.2)) as peer,
        ThreadPoolExecutor(1) as thread,
    ):
        first = thread.submit(peer.protect, *PROTECTION, 20)
        while not asked:
            time.sleep(0.01)
        with pytest.raises(UnavailableError, match="protects another attempt; retry"):
            peer.protect(*PROTECTION, 20)
        time.sleep(0.5)
        is_over.set()
        assert first.result() == 1 << 40
        assert peer.protect(*PROTECTION, 20) == 1 << 40
        is_over.clear()
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match="did not answer in time"):
            peer.protect(*PROTECTION, 0.1)
        assert time.monotonic() - begun < 5
        is_over.set()
    attempt, packs, bytes_per_second = PROTECTION
    assert asked == 3 * [Protection(attempt, packs, bytes_per_second)] and [*asked[0].packs] == ["n4", NODE]


def test_a_node_that_answers_is_silent_no_more(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("latest", b"1")
    monkeypatch.setattr("holdfast.backends.stores.peers.silence._SECONDS", 1e9)
    is_begun, is_over = threading.Event(), threading.Event()

    def protect(task: Protection) -> int:
        is_begun.set()
        is_over.wait(10)
        return 7

    with (
        closing(PeerServer(store, CREDENTIALS, "127.0.0.1", protect=protect)) as server,
        closing(Peer(server.address, CREDENTIALS, 0.5)) as peer,
        ThreadPoolExecutor(1) as thread,
    ):
        protection = thread.submit(peer.protect, *PROTECTION, 20)
        assert is_begun.wait(10)
        while server.pages.acquire(blocking=False):  # No memory: the agent answers too late.
            pass
        for call in (lambda: [*peer.list()], lambda: peer.size("latest")):
            with pytest.raises(UnavailableError, match="did not answer in time"):
                call()
        is_over.set()
        assert protection.result() == 7
        assert peer.size("latest") == 1


def test_only_an_agent_with_peers_protects(peer: Peer) -> None:
    with pytest.raises(InvalidError, match=r"node n3 .*POST /protect: this agent makes no parity"):
        peer.protect(*PROTECTION, 10)


def test_the_reason_for_no_parity_comes_back(store: LocalStore) -> None:
    def protect(task: Protection) -> int:
        raise UnavailableError("node n4 has 0 packs of 0 bytes; expected 1 of 7")

    with (
        closing(PeerServer(store, CREDENTIALS, "127.0.0.1", protect=protect)) as server,
        closing(Peer(server.address, CREDENTIALS, 10)) as peer,
    ):
        for _ in range(2):
            with pytest.raises(UnavailableError, match="node n4 has 0 packs of 0 bytes; expected 1 of 7"):
                peer.protect(*PROTECTION, 10)


def test_names_come_by_pages_in_order(store: LocalStore, server: PeerServer, peer: Peer) -> None:
    store.put("a/00000", b"123")
    store.put("b", b"12")
    for number in range(1, PAGE_NAMES + 1):
        os.link(f"{store.url}/a/00000", f"{store.url}/a/{number:05d}")
    found = list(peer.list())
    assert found == list(store.list()) and len(found) == PAGE_NAMES + 2
    assert [entry.bytes for entry in (found[0], *found[-2:])] == [3, 3, 2]
    assert [entry.key for entry in peer.list("a/", after="a/04094")] == ["a/04095", "a/04096"]
    assert not list(peer.list("c/"))
    assert len(server._conversations) == 1, "each call took the connection of the one before"


def test_a_connection_that_the_agent_has_closed_is_replaced(server: PeerServer, store: LocalStore, peer: Peer) -> None:
    store.put("latest", b"1")
    assert peer.size("latest") == 1
    for conversation in list(server._conversations):
        conversation.link.cut()
    assert bytes(peer.get("latest", 1)) == b"1"


def test_few_connections_wait_for_the_next_call(server: PeerServer, store: LocalStore, peer: Peer) -> None:
    def await_connections(count: int) -> None:
        for _ in range(1000):
            if len(server._conversations) == count:
                break
            time.sleep(0.01)
        assert len(server._conversations) == count

    store.put("latest", b"1")
    pages = sum(iter(partial(server.pages.acquire, blocking=False), False))  # No memory: the threads wait for pages.
    with ThreadPoolExecutor(20) as threads:
        found = [threads.submit(lambda: [*peer.list()]) for _ in range(20)]
        await_connections(20)
        server.pages.release(pages)
    assert all(each.result() == [StoreEntry("latest", 1)] for each in found)
    await_connections(8)
    assert peer.size("latest") == 1
    await_connections(8)


def test_a_forked_child_has_connections_of_its_own(server: PeerServer, store: LocalStore, peer: Peer) -> None:
    store.put("latest", b"12345")
    assert peer.size("latest") == 5
    with server._lock:  # The agent notes a connection after the thread of the connection has begun.
        (before,) = server._conversations
    with peer._lock:  # Another thread may hold the lock meanwhile.
        child = os.fork()
    if not child:
        try:
            os._exit(peer.size("latest"))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert bytes(peer.get("latest", 5)) == b"12345"
    assert next(iter(server._conversations)) is before, "the child has not closed the connection of the parent"


@pytest.mark.parametrize("key", ["../x", ".x", "a//b", "/a", "a b", "a\r\nb: c", ""])
def test_the_client_sends_no_text_that_is_no_key(server: PeerServer, key: str) -> None:
    peer = Peer(server.address, CREDENTIALS, 10)
    for call in (lambda: peer.get(key, 1), lambda: peer.size(key), lambda: peer.delete([key]),
                 lambda: peer.move(key, "b"), lambda: peer.move("b", key),
                 lambda: peer.put_if_absent(key, b""), lambda: list(peer.list(key + "/"))):  # fmt: skip
        with pytest.raises(InvalidError, match="expected"):
            call()
    assert not server._conversations


@pytest.mark.parametrize(
    ("credentials", "found"),
    [
        (Credentials("run-8", SECRET, NODE), "has another run: found run-7; expected run-8"),
        (Credentials(RUN, SECRET, "n4"), "has another node: found n3; expected n4"),
        (Credentials(RUN, b"another", NODE), "has another secret: found a proof that does not fit"),
    ],
)
def test_ends_of_other_runs_name_the_node(server: PeerServer, credentials: Credentials, found: str) -> None:
    with pytest.raises(InvalidError, match=rf"node n[34] \(127\.0\.0\.1:\d+\): the agent {found}") as caught:
        Peer(server.address, credentials, 10).size("latest")
    assert "another" not in repr(credentials)
    assert SECRET.hex() not in str(caught.value)


def test_an_agent_that_is_gone_is_unavailable_and_nothing_is_absent(server: PeerServer, peer: Peer) -> None:
    with pytest.raises(MissingError):
        peer.size("latest")
    server.close()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="node n3"):
            peer.size("latest")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "0", "::"])
def test_every_address_is_refused(store: LocalStore, host: str) -> None:
    with pytest.raises(InvalidError, match="every address of this node; expected the one for peers"):
        PeerServer(store, CREDENTIALS, host)


def test_a_port_in_use_and_a_foreign_address_are_refused(server: PeerServer, store: LocalStore) -> None:
    host, port = server.address
    with pytest.raises(InvalidError, match=rf"could not listen at {host}:{port} \(.*in use.*Choose another"):
        PeerServer(store, CREDENTIALS, host, port)
    with pytest.raises(InvalidError, match=r"could not listen at 192\.0\.2\.1:0"):
        PeerServer(store, CREDENTIALS, "192.0.2.1")


def test_the_port_is_free_after_the_end(server: PeerServer, store: LocalStore, peer: Peer) -> None:
    store.put("latest", b"1")
    assert peer.size("latest") == 1
    server.close()
    again = PeerServer(store, CREDENTIALS, *server.address)
    assert peer.size("latest") == 1
    again.close()


def test_it_serves_ipv6(store: LocalStore) -> None:
    store.put("latest", b"1")
    try:
        server = PeerServer(store, CREDENTIALS, "::1")
    except InvalidError:
        pytest.skip("this machine has no IPv6")
    peer = Peer(server.address, CREDENTIALS, 10)
    assert peer.size("latest") == 1
    peer.close()
    server.close()


def run(statement: str) -> str:
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_without_h11_the_error_names_the_command() -> None:
    for module in ("holdfast.agent.serving", "holdfast.backends.stores.peers.peer"):
        printed = run(f"import sys; sys.modules['h11'] = None; import {module}")
        assert "holdfast.errors.InvalidError: peers need the package h11" in printed
        assert "pip install 'holdfast[agent]'" in printed


def test_an_agent_needs_no_torch() -> None:
    assert run("import sys, holdfast.agent.serving; print('torch' in sys.modules)") == "False\n"
