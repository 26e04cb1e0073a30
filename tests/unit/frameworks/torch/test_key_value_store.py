"""The key-value store over real connections: broken ones, idle ones, and how many there are."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from holdfast.errors import UnavailableError
from holdfast.frameworks.torch import key_value_store
from holdfast.frameworks.torch.key_value_store import TorchKeyValueStore


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


def cut(port: int) -> None:
    for connection in connections(port):
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("idle", [False, True])
def test_calls_go_on_over_a_new_connection_if_the_old_one_broke(
    server: dist.TCPStore, store: TorchKeyValueStore, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if idle:
        monkeypatch.setattr(key_value_store, "_IDLE_SECONDS", 0.0)
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
    monkeypatch.setattr(key_value_store, "_IDLE_SECONDS", 0.0)
    cut(server.port)
    assert store.add("count", 1, 5.0) == 3, "no request was sent over the broken connection"


def test_a_store_that_is_gone_fails_within_the_limit(store: TorchKeyValueStore, server: dist.TCPStore) -> None:
    dead = TorchKeyValueStore(server)
    dead._host = ("127.0.0.1", 1)
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
