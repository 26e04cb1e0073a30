"""Each fault of the proxy does what it says to one request, and the next one passes."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import pytest

from holdfast.testing.fault_proxy import FaultKind, FaultProxy, ProxiedRequest, ProxyFault
from tests.unit.testing.object_server import ObjectServer, object_server


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def proxy(server: ObjectServer) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", server.port) as proxy:
        yield proxy


def ask(
    proxy: FaultProxy, method: str, path: str, body: bytes | None = None, *, timeout: float = 60, **headers: str
) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def is_put(request: ProxiedRequest) -> bool:
    return request.method == "PUT"


def test_without_a_fault_everything_passes_on_one_connection(proxy: FaultProxy) -> None:
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    data = bytes(range(256)) * 1000
    for method, path, body, expected in (
        ("PUT", "/a", data, (200, b"")),
        ("GET", "/a", None, (200, data)),
        ("HEAD", "/a", None, (200, b"")),
        ("GET", "/none", None, (404, b"")),
        ("DELETE", "/a", None, (204, b"")),
        ("GET", "/a", None, (404, b"")),
    ):
        connection.request(method, path, body)
        reply = connection.getresponse()
        assert (reply.status, reply.read()) == expected
    connection.close()
    assert proxy.requests[0] == ProxiedRequest("PUT", "/a", 256_000)
    assert len(proxy.requests) == 6


@pytest.mark.parametrize(("kind", "is_stored"), ((FaultKind.CUT_BEFORE, False), (FaultKind.CUT_AFTER, True)))
def test_a_cut_is_before_or_after_the_server(
    proxy: FaultProxy, server: ObjectServer, kind: FaultKind, is_stored: bool
) -> None:
    fault = proxy.inject(ProxyFault(kind, is_put, skip=1))
    assert ask(proxy, "PUT", "/first", b"1") == (200, b"")
    with pytest.raises((OSError, HTTPException)):
        ask(proxy, "PUT", "/second", b"2" * 100_000)
    assert fault.met == 1
    assert ("/second" in server.objects) is is_stored
    assert ask(proxy, "PUT", "/second", b"3", **{"If-None-Match": "*"})[0] == (412 if is_stored else 200)


def test_it_refuses_so_many_requests(proxy: FaultProxy, server: ObjectServer) -> None:
    proxy.inject(ProxyFault(FaultKind.REFUSE, times=2, status=429, retry_after_seconds=3))
    statuses = [ask(proxy, "PUT", "/a", b"1" * 200_000)[0] for _ in range(3)]
    assert statuses == [429, 429, 200]
    proxy.inject(ProxyFault(FaultKind.REFUSE, times=math.inf))
    assert [ask(proxy, "HEAD", "/a")[0] for _ in range(3)] == [503] * 3
    proxy.heal()
    assert ask(proxy, "GET", "/a")[0] == 200


def test_a_black_hole_takes_no_byte_until_it_is_released(proxy: FaultProxy, server: ObjectServer) -> None:
    fault = proxy.inject(ProxyFault(FaultKind.SILENCE, is_put))
    with pytest.raises(TimeoutError):
        ask(proxy, "PUT", "/a", b"1" * 100, timeout=0.05)
    assert fault.reached.is_set() and "/a" not in server.objects
    assert ask(proxy, "PUT", "/a", b"2")[0] == 200
    fault.release()
    assert ask(proxy, "GET", "/a") == (200, b"2")


def test_a_delay_ends_early_when_it_is_healed(proxy: FaultProxy) -> None:
    fault = proxy.inject(ProxyFault(FaultKind.DELAY, seconds=600))
    replies: list[int] = []
    asking = threading.Thread(target=lambda: replies.append(ask(proxy, "PUT", "/a", b"1")[0]))
    asking.start()
    assert fault.reached.wait(60) and not replies
    proxy.heal()
    asking.join(60)
    assert replies == [200]


@pytest.mark.parametrize("offset", (0, 70_000, 99_999))
def test_one_bit_is_flipped(proxy: FaultProxy, server: ObjectServer, offset: int) -> None:
    data = bytes(100_000)
    changed = bytearray(data)
    changed[offset] = 1
    proxy.inject(ProxyFault(FaultKind.FLIP_REQUEST, is_put, offset=offset))
    assert ask(proxy, "PUT", "/a", data)[0] == 200
    assert server.objects["/a"] == changed
    proxy.inject(ProxyFault(FaultKind.FLIP_REPLY, offset=offset))
    assert ask(proxy, "GET", "/a") == (200, data)
    assert ask(proxy, "GET", "/a") == (200, bytes(changed))


def test_chunked_bodies_and_an_asked_continue_pass() -> None:
    """A server of one connection that speaks both."""
    body = b"5\r\nhello\r\n0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                while stream.readline() != b"\r\n":
                    pass
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                assert stream.read(len(body)) == body
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
                ended.wait(60)

        ended = threading.Event()
        serving = threading.Thread(target=serve)
        serving.start()
        with (
            FaultProxy("127.0.0.1", listener.getsockname()[1]) as proxy,
            socket.create_connection(("127.0.0.1", proxy.port)) as client,
            client.makefile("rb") as stream,
        ):
            client.sendall(b"PUT /a HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert (stream.readline(), stream.readline()) == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
            client.sendall(body)
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            while stream.readline() != b"\r\n":
                pass
            assert stream.read(len(body)) == body
            ended.set()
        serving.join(60)
