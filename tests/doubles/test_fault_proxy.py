"""Each fault of the proxy does what it says to one request, and the next one passes."""

from __future__ import annotations

import math
import socket
import threading
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import pytest

from tests.doubles.fault_proxy import FaultKind, FaultProxy, ProxiedRequest, ProxyFault
from tests.support.object_server import BUCKET, ObjectServer


def port_of(server: ObjectServer) -> int:
    return int(server.endpoint.rpartition(":")[2])


@pytest.fixture
def proxy(objects: ObjectServer) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", port_of(objects)) as proxy:
        yield proxy


@pytest.fixture
def top() -> str:
    """The path of a folder that nobody has used."""
    return f"/{BUCKET}/{uuid.uuid4().hex}"


def ask(
    proxy: FaultProxy | int, method: str, path: str, body: bytes | None = None, *, timeout: float = 60, **headers: str
) -> tuple[int, bytes]:
    """Ask through the proxy, or a port."""
    port = proxy if isinstance(proxy, int) else proxy.port
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def is_put(request: ProxiedRequest) -> bool:
    return request.method == "PUT"


def test_without_a_fault_everything_passes_on_one_connection(proxy: FaultProxy, top: str) -> None:
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    data = bytes(range(256)) * 1000
    for method, name, body, status in (
        ("PUT", "/a", data, 200),
        ("GET", "/a", None, 200),
        ("HEAD", "/a", None, 200),
        ("GET", "/none", None, 404),
        ("DELETE", "/a", None, 204),
        ("GET", "/a", None, 404),
    ):
        connection.request(method, top + name, body)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == status
        assert method != "GET" or status != 200 or content == data
    connection.close()
    assert proxy.requests[0] == ProxiedRequest("PUT", f"{top}/a", 256_000)
    assert len(proxy.requests) == 6


def test_a_reply_is_whole_although_the_connection_ends_with_it(proxy: FaultProxy, top: str) -> None:
    data = bytes(range(256)) * 10_000
    assert ask(proxy, "PUT", f"{top}/a", data, Connection="close")[0] == 200
    assert ask(proxy, "GET", f"{top}/a", Connection="close") == (200, data)


@pytest.mark.parametrize(("kind", "is_stored"), ((FaultKind.CUT_BEFORE, False), (FaultKind.CUT_AFTER, True)))
def test_a_cut_is_before_or_after_the_server(proxy: FaultProxy, top: str, kind: FaultKind, is_stored: bool) -> None:
    fault = proxy.inject(ProxyFault(kind, is_put, skip=1))
    assert ask(proxy, "PUT", f"{top}/first", b"1")[0] == 200
    with pytest.raises((OSError, HTTPException)):
        ask(proxy, "PUT", f"{top}/second", b"2" * 100_000)
    assert fault.met == 1
    assert ask(proxy, "PUT", f"{top}/second", b"3", **{"If-None-Match": "*"})[0] == (412 if is_stored else 200)


def test_it_refuses_so_many_requests(proxy: FaultProxy, top: str) -> None:
    proxy.inject(ProxyFault(FaultKind.REFUSE, times=2, status=429, retry_after_seconds=3))
    statuses = [ask(proxy, "PUT", f"{top}/a", b"1" * 200_000)[0] for _ in range(3)]
    assert statuses == [429, 429, 200]
    proxy.inject(ProxyFault(FaultKind.REFUSE, times=math.inf))
    assert [ask(proxy, "HEAD", f"{top}/a")[0] for _ in range(3)] == [503] * 3
    proxy.heal()
    assert ask(proxy, "GET", f"{top}/a")[0] == 200


def test_a_black_hole_takes_no_byte_until_it_is_released(proxy: FaultProxy, top: str) -> None:
    fault = proxy.inject(ProxyFault(FaultKind.SILENCE, is_put))
    ended: list[BaseException] = []

    def put() -> None:
        try:
            ask(proxy, "PUT", f"{top}/a", b"1" * 100)
        except (OSError, HTTPException) as error:
            ended.append(error)

    asking = threading.Thread(target=put)
    asking.start()
    assert fault.reached.wait(60)
    assert ask(proxy, "GET", f"{top}/a")[0] == 404
    assert ask(proxy, "PUT", f"{top}/a", b"2")[0] == 200
    assert not ended
    fault.release()
    asking.join(60)
    assert ended
    assert ask(proxy, "GET", f"{top}/a") == (200, b"2")


def test_a_delay_ends_early_when_it_is_healed(proxy: FaultProxy, top: str) -> None:
    fault = proxy.inject(ProxyFault(FaultKind.DELAY, seconds=600))
    replies: list[int] = []
    asking = threading.Thread(target=lambda: replies.append(ask(proxy, "PUT", f"{top}/a", b"1")[0]))
    asking.start()
    assert fault.reached.wait(60) and not replies
    proxy.heal()
    asking.join(60)
    assert replies == [200]


@pytest.mark.parametrize("offset", (0, 70_000, 99_999))
def test_one_bit_is_flipped(proxy: FaultProxy, objects: ObjectServer, top: str, offset: int) -> None:
    data = bytes(100_000)
    changed = bytearray(data)
    changed[offset] = 1
    proxy.inject(ProxyFault(FaultKind.FLIP_REQUEST, is_put, offset=offset))
    assert ask(proxy, "PUT", f"{top}/a", data)[0] == 200
    assert ask(port_of(objects), "GET", f"{top}/a") == (200, bytes(changed))
    proxy.inject(ProxyFault(FaultKind.FLIP_REPLY, offset=offset))
    assert ask(proxy, "GET", f"{top}/a") == (200, data)
    assert ask(proxy, "GET", f"{top}/a") == (200, bytes(changed))


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
