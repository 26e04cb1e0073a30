"""Ranges that are read over plain HTTP straight into the memory of the caller."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from holdfast.errors import CorruptError, MissingError
from holdfast.ports.temporary import TemporaryError
from holdfast.settings import KIB, MIB, ObjectSettings, Settings
from holdfast.stores.objects.store import ObjectStore
from tests.object_proxy import ObjectProxy, object_proxy
from tests.object_server import ObjectServer

DATA = random.Random(17).randbytes(2 * MIB + 5)
RANGES = [(3, MIB), (MIB, MIB), (MIB, MIB + 7), (MIB + 100, 2 * MIB + 5)]


def _keep(seen: list[tuple[int, bytes]], number: int, view: memoryview) -> None:
    seen.append((number, bytes(view)))


@pytest.fixture
def proxy(objects: ObjectServer) -> Iterator[ObjectProxy]:
    with object_proxy(objects.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(objects: ObjectServer, proxy: ObjectProxy) -> ObjectStore:
    store = store_at(objects.new_url(), proxy.endpoint)
    store.put("key", DATA)
    proxy.asked.clear()
    return store


def store_at(url: str, endpoint: str, **settings: object) -> ObjectStore:
    return ObjectStore(url, settings=Settings(object_store=ObjectSettings(endpoint=endpoint), **settings))  # type: ignore[arg-type]


def read(store: ObjectStore, ranges: list[tuple[int, int]] = RANGES) -> None:
    """Read ranges, with and without being told of each; require the right bytes."""
    for is_told in (False, True):
        buffers = [bytearray(stop - start) for start, stop in ranges]
        seen: list[tuple[int, bytes]] = []
        views = [memoryview(buffer) for buffer in buffers]
        take = partial(_keep, seen) if is_told else None
        store.read_into("key", ranges, views, take)
        expected = [DATA[start:stop] for start, stop in ranges]
        assert (seen if is_told else buffers) == (list(enumerate(expected)) if is_told else expected)


def test_neighbours_are_read_by_one_request_of_our_own(store: ObjectStore, proxy: ObjectProxy) -> None:
    read(store)
    assert [(asked.method, asked.headers["range"]) for asked in proxy.asked] == 2 * [("GET", f"bytes=3-{2 * MIB + 4}")]
    assert all("Signature=" in asked.headers["authorization"] for asked in proxy.asked)
    assert all("user-agent" not in asked.headers for asked in proxy.asked), "the client library asked"


@pytest.mark.parametrize(
    "ranges", ([(0, 100)], [(MIB, 2 * MIB), (0, MIB)], [(0, 10), (MIB, 2 * MIB)], [(0, MIB), (MIB - 5, 2 * MIB)])
)
def test_what_is_small_or_scattered_is_left_to_the_library(
    store: ObjectStore, proxy: ObjectProxy, ranges: list[tuple[int, int]]
) -> None:
    read(store, ranges)
    assert all("user-agent" in asked.headers for asked in proxy.asked)


@pytest.mark.parametrize("name", ("http_proxy", "all_proxy"))
def test_a_proxy_of_the_variables_is_left_to_the_library(
    objects: ObjectServer, proxy: ObjectProxy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    plain = store_at(objects.new_url(), proxy.endpoint)._plain
    assert plain is not None and not plain.reads(RANGES)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert plain.reads(RANGES)


def test_tls_anonymous_readers_and_proxies_are_left_to_the_library(objects: ObjectServer) -> None:
    for chosen in (
        ObjectSettings(endpoint="https://127.0.0.1:1"),
        ObjectSettings(),
        ObjectSettings(endpoint=objects.endpoint, anonymous=True),
        ObjectSettings(endpoint=objects.endpoint, proxy="http://127.0.0.1:1"),
    ):
        plain = ObjectStore(objects.new_url(), settings=Settings(object_store=chosen))._plain
        assert plain is not None and not plain.reads(RANGES)


def test_an_absent_object_is_missing_and_a_short_one_corrupt(store: ObjectStore) -> None:
    for stop in (3 * MIB, 2 * MIB + 6):
        with pytest.raises(CorruptError, match="key"):
            store.read_into("key", [(0, stop)], [memoryview(bytearray(stop))])
    with pytest.raises(CorruptError):
        store.read_into("key", [(3 * MIB, 4 * MIB)], [memoryview(bytearray(MIB))])
    with pytest.raises(MissingError):
        store.read_into("absent", [(0, MIB)], [memoryview(bytearray(MIB))])


def test_a_server_under_pressure_is_asked_once(store: ObjectStore, proxy: ObjectProxy) -> None:
    proxy.rule = lambda _: (503, "SlowDown")
    with pytest.raises(TemporaryError, match="SlowDown") as busy:
        read(store)
    assert busy.value.is_throttled and len(proxy.asked) == 1
    proxy.rule = lambda _: None
    read(store)


def test_silence_is_ended(objects: ObjectServer, proxy: ObjectProxy) -> None:
    store = store_at(objects.new_url(), proxy.endpoint, silence_timeout_seconds=0.5)
    store.put("key", DATA)
    silent = threading.Event()
    proxy.rule = lambda asked: silent.wait(60) and None
    try:
        with pytest.raises(TemporaryError, match="no answer came in time") as late:
            read(store)
    finally:
        silent.set()
    assert late.value.is_throttled


def test_an_error_of_the_caller_is_its_own(store: ObjectStore) -> None:
    def fail(number: int, data: memoryview) -> None:
        raise OSError("the target broke")

    with pytest.raises(OSError, match="the target broke"):
        store.read_into("key", RANGES, [memoryview(bytearray(stop - start)) for start, stop in RANGES], fail)
    read(store)


HEAD = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {MIB}\r\nContent-Range: bytes 0-{MIB - 1}/{len(DATA)}\r\n\r\n"


@contextmanager
def answering(*answers: Callable[[socket.socket], object]) -> Iterator[tuple[ObjectStore, list[int]]]:
    """Run a server that reads a request before each answer, and ends the connection after one that returns False.

    Yields:
        A store there, and the number of the connection of each request.
    """
    left, asked = list(answers), list[int]()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for number in range(len(answers)):
                connection, _ = listener.accept()
                with connection:
                    while left and connection.recv(1 << 16):
                        asked.append(number)
                        if left.pop(0)(connection) is False:
                            break
                if not left:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield store_at("s3://bucket/folder", f"http://127.0.0.1:{listener.getsockname()[1]}"), asked
        thread.join(60)


def whole(connection: socket.socket) -> None:
    connection.sendall(HEAD.encode() + DATA[:MIB])


def test_a_connection_is_kept_and_one_that_the_server_closed_is_made_anew(objects: ObjectServer) -> None:
    def last(connection: socket.socket) -> bool:
        whole(connection)
        return False

    with answering(whole, last, last) as (store, asked):
        for _ in range(3):
            buffer = bytearray(MIB)
            store.read_into("key", [(0, MIB)], [memoryview(buffer)])
            assert buffer == DATA[:MIB]
    assert asked == [0, 0, 1]


@pytest.mark.parametrize(
    "sent", (HEAD.encode()[:40], b"nonsense\r\n\r\n", HEAD.encode() + DATA[: 700 * KIB], b"x" * 200_000)
)
def test_what_breaks_off_or_is_no_answer_is_temporary(objects: ObjectServer, sent: bytes) -> None:
    def broken(connection: socket.socket) -> bool:
        connection.sendall(sent)
        return False

    with answering(broken) as (store, _):
        taken: list[int] = []
        ranges = [(0, 512 * KIB), (512 * KIB, MIB)]
        with pytest.raises(TemporaryError):
            store.read_into(
                "key", ranges, [memoryview(bytearray(512 * KIB))] * 2, lambda number, _: taken.append(number)
            )
    assert taken == ([0] if len(sent) > 512 * KIB else []), "a retry goes on behind what is whole"


def test_a_forked_process_has_connections_of_its_own(store: ObjectStore, proxy: ObjectProxy) -> None:
    read(store)
    child = os.fork()
    if not child:
        try:
            read(store, [(0, MIB)])
            os._exit(0)
        finally:
            os._exit(1)
    read(store)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
