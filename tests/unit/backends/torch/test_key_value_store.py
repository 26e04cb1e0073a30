"""The key-value store over real connections: broken ones, idle ones, and how many there are."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from holdfast.backends.torch import connection_pool
from holdfast.backends.torch.connection_pool import ConnectionPool
from holdfast.backends.torch.key_value_store import TorchKeyValueStore
from holdfast.errors import UnavailableError


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture
def store(server: dist.TCPStore) -> TorchKeyValueStore:
    return TorchKeyValueStore(dist.PrefixStore("any", server))


def connections(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a port."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername()[1:2] == (port,):
                    yield connection


def inodes() -> set[int]:
    """Return the inodes of all open files of this process."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.fstat(int(descriptor)).st_ino)
    return found


def cut(port: int) -> None:
    for connection in connections(port):
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("idle", [False, True])
def test_calls_go_on_over_a_new_connection_if_the_old_one_broke(
    server: dist.TCPStore, store: TorchKeyValueStore, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if idle:
        monkeypatch.setattr(connection_pool, "_IDLE_SECONDS", 0.0)
    calls = {
        "set": lambda: store.set("a", b"1", 5.0),
        "get": lambda: store.get_many(["a"], 5.0),
        "wait": lambda: store.wait(["a"], 5.0),
        "check": lambda: store.present("a"),
        "compare_set": lambda: store.compare_set("b", b"", b"2", 5.0),
        "delete": lambda: store.delete(["c"]),
    }
    store.set("a", b"0", 5.0)
    for name, call in calls.items():
        cut(server.port)
        assert call() in (None, [b"1"], True, b"2"), name
    assert store.get_many(["a", "b"], 5.0) == [b"1", b"2"]


def test_add_is_never_repeated_and_an_idle_connection_is_tried_out_before_it(
    server: dist.TCPStore, store: TorchKeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.add("count", 1, 5.0) == 1
    cut(server.port)
    with pytest.raises(UnavailableError, match="opens a new connection"):
        store.add("count", 1, 5.0)
    assert store.add("count", 1, 5.0) == 2
    monkeypatch.setattr(connection_pool, "_IDLE_SECONDS", 0.0)
    cut(server.port)
    assert store.add("count", 1, 5.0) == 3, "no request was sent over the broken connection"


def test_a_store_that_is_gone_fails_within_the_limit(store: TorchKeyValueStore, server: dist.TCPStore) -> None:
    dead = TorchKeyValueStore(server)
    dead._connections._host = ("127.0.0.1", 1)
    start = time.monotonic()
    with pytest.raises(UnavailableError):
        dead.set("a", b"1", 3.0)
    assert time.monotonic() - start < 9.0


def test_every_connection_is_kept_alive(server: dist.TCPStore, store: TorchKeyValueStore) -> None:
    store.set("a", b"1", 5.0)
    options = [connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for connection in connections(server.port)]
    assert len(options) >= 2 and all(options), options


def test_a_new_connection_leaves_the_sockets_of_others_blocking(store: TorchKeyValueStore) -> None:
    """Gloo and c10d own sockets of this process. A training may limit the sockets of its downloads."""
    ours, theirs = socket.socketpair()
    socket.setdefaulttimeout(30.0)
    try:
        store.set("a", b"1", 5.0)
        blocking = [os.get_blocking(each.fileno()) for each in (ours, theirs)]
        assert store.get_many(["a"], 5.0) == [b"1"]
    finally:
        socket.setdefaulttimeout(None)
        for each in (ours, theirs):
            each.close()
    assert blocking == [True, True]


def test_threads_in_turn_share_one_connection(server: dist.TCPStore, store: TorchKeyValueStore) -> None:
    before = len(list(connections(server.port)))
    for number in range(4):
        thread = threading.Thread(target=store.set, args=(f"{number}", b"1", 5.0))
        thread.start()
        thread.join()
    assert len(list(connections(server.port))) - before == 1


def test_a_call_waits_for_a_free_connection_rather_than_opens_a_fifth(
    server: dist.TCPStore, store: TorchKeyValueStore
) -> None:
    before = len(list(connections(server.port)))
    with ThreadPoolExecutor(5) as pool:
        waits = [pool.submit(store.wait, [f"later/{number}"], 60.0) for number in range(4)]
        while len(list(connections(server.port))) - before < 4:
            time.sleep(0.01)
        call = pool.submit(store.set, "other", b"1", 60.0)
        server.set("holdfast/later/1", b"1")
        assert call.result(60.0) is None
        for number in (0, 2, 3):
            server.set(f"holdfast/later/{number}", b"1")
        assert [wait.result(60.0) for wait in waits] == [None] * 4
    assert len(list(connections(server.port))) - before == 4


def test_a_call_that_is_urgent_opens_a_fifth_connection_for_itself(
    server: dist.TCPStore, store: TorchKeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "_CROWDED_SECONDS_MAX", 0.0)
    before = len(list(connections(server.port)))
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(store.wait, [f"later/{number}"], 60.0) for number in range(4)]
        while len(list(connections(server.port))) - before < 4:
            time.sleep(0.01)
        for number in range(4):
            store.set(f"later/{number}", b"1", 60.0)
        assert [wait.result(60.0) for wait in waits] == [None] * 4
    assert len(list(connections(server.port))) - before == 4, "the fifth was closed"


def test_a_wait_that_runs_out_keeps_its_connection(server: dist.TCPStore, store: TorchKeyValueStore) -> None:
    """The error refers to the frames of the wait. A second connection would stand beside the first while it is kept."""
    before = len(list(connections(server.port)))
    with pytest.raises(TimeoutError) as kept:
        store.wait(["never"], 0.05)
    ports = {connection.getsockname() for connection in connections(server.port)}
    store.set("a", b"1", 5.0)
    assert len(list(connections(server.port))) - before == 1, kept
    assert {connection.getsockname() for connection in connections(server.port)} == ports


def test_a_broken_connection_is_closed_before_the_next_one_is_opened(
    server: dist.TCPStore, store: TorchKeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_before: list[bool] = []
    sockets: set[int] = set()
    connect = ConnectionPool._connect

    def watched(pool: ConnectionPool, timeout: timedelta) -> object:
        # A connection that is cut has no peer any more, but stays open.
        open_before.append(bool(sockets & inodes()))
        return connect(pool, timeout)

    monkeypatch.setattr(ConnectionPool, "_connect", watched)
    others = {os.fstat(connection.fileno()).st_ino for connection in connections(server.port)}
    store.set("a", b"1", 5.0)
    sockets = {os.fstat(connection.fileno()).st_ino for connection in connections(server.port)} - others
    assert len(sockets) == 1
    cut(server.port)
    assert store.get_many(["a"], 5.0) == [b"1"]
    assert open_before == [False, False]


def test_a_connection_that_nobody_needs_is_closed(
    server: dist.TCPStore, store: TorchKeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(list(connections(server.port)))
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(store.wait, ["later"], 60.0)
        while len(list(connections(server.port))) - before < 1:
            time.sleep(0.01)
        store.set("later", b"1", 60.0)
        wait.result(60.0)
    assert len(list(connections(server.port))) - before == 2
    monkeypatch.setattr(connection_pool, "_SPARE_SECONDS", 0.0)
    store.set("a", b"1", 5.0)
    assert len(list(connections(server.port))) - before == 1


def test_an_interrupted_call_gives_up_its_connection(server: dist.TCPStore, store: TorchKeyValueStore) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = len(list(connections(server.port)))
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            store._call("wait", "a", 5.0, interrupted)
    store.set("a", b"1", 5.0)
    assert len(list(connections(server.port))) - before == 1
