"""The memory of objects on their way: how much there is, and when it is used again."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from holdfast.backends.stores.remote.memory import BytesInFlight, ObjectUpload
from holdfast.base.ports.parts import PartLedger, address_of
from holdfast.settings import KIB, MIB, PAGE_BYTES

T = TypeVar("T")


def upload(bound: BytesInFlight, count: int) -> ObjectUpload:
    """Return an upload whose parts are written."""
    ledger = PartLedger("somewhere", bytes_max=count, part_bytes=-(-count // PAGE_BYTES) * PAGE_BYTES)
    begun = ObjectUpload(ledger, bound, lambda _: None)
    begun.write(0, begun.room(0, count))
    return begun


def test_eight_packs_with_headers_fit() -> None:
    bound = BytesInFlight(8 * 32 * MIB)
    uploads = [upload(bound, 32 * MIB + header) for header in 8 * [8 * KIB]]
    waited = threading.Thread(target=lambda: uploads.append(upload(bound, 32 * MIB)), daemon=True)
    waited.start()
    waited.join(0.05)
    assert waited.is_alive(), "a ninth one waits"
    uploads[0].complete()
    waited.join(60)
    assert len(uploads) == 9
    for each in uploads:
        each.abort()


def test_memory_is_used_again_once_its_request_is_over() -> None:
    bound = BytesInFlight(8 * MIB)
    other = upload(bound, PAGE_BYTES)
    first = upload(bound, 2 * MIB + 5)
    address = address_of(first.room(0, 2 * MIB + 5))
    first.complete()
    second = upload(bound, 2 * MIB + 1)
    assert address_of(second.room(0, 2 * MIB + 1)) == address
    second.abort()
    assert not bound._free, "whoever gave up may still fill it"
    third = upload(bound, MIB)
    third.complete()
    assert bound._free
    other.abort()
    assert not bound._free, "without an object in flight nothing is kept"


def holding(data: memoryview) -> Iterator[tuple[bytes]]:
    """Hold memory as the client does while it sends, by the buffer itself; yield pairs of its bytes."""
    return struct.iter_unpack("2s", data)


@contextmanager
def held_by_a_failed_try(hold: Callable[[memoryview], T]) -> Iterator[T]:
    """Fail the first try of an upload of ones, complete it, and fill another with twos; yield what the first try held.

    Args:
        hold: What a request that goes on holds of the memory that it was given.
    """
    bound = BytesInFlight(8 * MIB)
    other = upload(bound, PAGE_BYTES)
    held: list[T] = []

    def create(data: memoryview) -> None:
        if not held:
            held.append(hold(data))
            raise OSError("no answer")

    first = ObjectUpload(PartLedger("somewhere", bytes_max=MIB, part_bytes=MIB), bound, create)
    room = first.room(0, MIB)
    room[:] = b"1" * MIB
    first.write(0, room)
    with pytest.raises(OSError, match="no answer"):
        first.complete()
    first.complete()
    second = upload(bound, MIB)
    second.room(0, MIB)[:] = b"2" * MIB
    yield held[0]
    second.abort()
    other.abort()


def test_memory_of_a_request_that_goes_on_is_not_used_again() -> None:
    """A try that failed may go on after its error, also if another try has succeeded since."""
    with held_by_a_failed_try(holding) as under_way:
        assert next(under_way) == (b"11",)


def test_a_part_of_memory_that_is_held_keeps_all_of_it() -> None:
    """A file system is sent a block at a time: who was given up holds the rest, and not what it was given."""
    with held_by_a_failed_try(lambda data: data[KIB:]) as rest:
        assert rest[:2] == b"11"


def test_the_client_holds_what_it_sends() -> None:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    sent = memoryview(bytearray(b"x" * 32 * MIB))[: 16 * MIB]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = S3Store(
            "bucket",
            endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}",
            access_key_id="a",
            secret_access_key="b",
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        failed: list[Exception] = []

        def put() -> None:
            try:
                obstore.put(client, "key", sent, use_multipart=False)
            except BaseError as error:
                failed.append(error)

        putting = threading.Thread(target=put)
        putting.start()
        connection, _ = listener.accept()
        assert connection.recv(3) == b"PUT"
        with pytest.raises(BufferError):
            sent.release()
        connection.close()
        putting.join(60)
        assert failed
