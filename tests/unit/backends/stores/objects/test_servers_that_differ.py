"""What servers do that differ from Amazon's, each on a real server behind a proxy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.backends.stores.objects import reading
from holdfast.backends.stores.objects.conditional_delete import _OTHER_TAG
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import MIB, ObjectSettings, Settings
from tests.servers.server import TLS
from tests.support.object_proxy import Asked, ObjectProxy, object_proxy
from tests.support.object_server import BUCKET, ObjectServer


@pytest.fixture
def proxy(objects: ObjectServer) -> Iterator[ObjectProxy]:
    with object_proxy(objects.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(objects: ObjectServer, proxy: ObjectProxy) -> ObjectStore:
    return ObjectStore(objects.new_url(), settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))


def test_a_look_is_refused_in_words(store: ObjectStore, proxy: ObjectProxy) -> None:
    """The reply to HEAD has no document, so what it is about is asked for once more."""

    def late_clock(asked: Asked) -> tuple[int, str] | None:
        return (403, "RequestTimeTooSkewed") if "key" in asked.path else None

    proxy.rule = late_clock
    for call in (lambda: store.size("key"), lambda: store.identity("key"), lambda: store.move("key", "other")):
        with pytest.raises(InvalidError, match="clock of this machine") as raised:
            call()
        assert raised.value.__cause__ is None
        assert raised.value.__context__ is None


def make_small_requests(store: ObjectStore) -> None:
    """Make requests with short replies, one after the other."""
    for _ in range(3):
        store.put("key", b"1")
        assert store.get("key", 1) == b"1"
        assert store.size("key") == 1
        assert [entry.key for entry in store.list()] == ["key"]


def test_a_short_reply_over_plain_http_comes_on_a_connection_of_its_own(store: ObjectStore, proxy: ObjectProxy) -> None:
    """Ceph holds the end of a short reply back until it is acknowledged, and on a used connection that takes 40 ms."""
    make_small_requests(store)
    assert len({asked.port for asked in proxy.asked}) == len(proxy.asked) == 12


def test_large_objects_go_over_kept_connections(store: ObjectStore, proxy: ObjectProxy) -> None:
    for number in range(3):
        upload = store.lent_upload(f"pack-{number}", [memoryview(bytes(9 * MIB))])
        upload.complete()
    assert len(proxy.asked) == 3
    assert len({asked.port for asked in proxy.asked}) == 1


def test_over_tls_connections_are_kept(objects: ObjectServer) -> None:
    """A handshake takes longer than what it would save."""
    with object_proxy(objects.endpoint, TLS / "server.pem") as secure:
        settings = Settings(object_store=ObjectSettings(endpoint=secure.endpoint, ca_file=str(TLS / "authority.pem")))
        make_small_requests(ObjectStore(objects.new_url(), settings=settings))
    # One client for what has a small bound, one for the rest.
    assert len({asked.port for asked in secure.asked}) <= 2 < len(secure.asked)


@pytest.mark.parametrize("status", (200, 202, 204))
def test_each_success_of_a_deletion_counts(objects: ObjectServer, proxy: ObjectProxy, status: int) -> None:
    """Azure answers 202 where others answer 204."""
    bucket = f"{BUCKET}-{status}"
    objects.client().create_bucket(Bucket=bucket)
    store = ObjectStore(f"s3://{bucket}/run", settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))

    def keeps_conditions(asked: Asked) -> tuple[int, str] | None:
        if asked.method != "DELETE":
            return None
        if asked.headers["if-match"] == _OTHER_TAG:
            return 412, "ConditionNotMet"
        objects.client().delete_object(Bucket=bucket, Key=asked.path.partition("?")[0].removeprefix(f"/{bucket}/"))
        return status, "Deleted"

    proxy.rule = keeps_conditions
    for key in ("one", "two"):
        store.put(key, b"1")
        proxy.asked.clear()
        store.move(key, "aside")
    deletions = [asked for asked in proxy.asked if asked.method == "DELETE" and "/run/two" in asked.path]
    assert [asked.headers.get("if-match") is not None for asked in deletions] == [True]


def test_a_question_that_a_collection_removed_is_asked_again(objects: ObjectServer, proxy: ObjectProxy) -> None:
    """Otherwise the process would delete without a condition from then on."""
    bucket, met = f"{BUCKET}-collected", list[str]()
    objects.client().create_bucket(Bucket=bucket)
    store = ObjectStore(f"s3://{bucket}/run", settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))

    def collected_once(asked: Asked) -> tuple[int, str] | None:
        if asked.method != "DELETE" or "probe-" not in asked.path or asked.headers.get("if-match") is None:
            return None
        met.append(asked.headers["if-match"])
        if len(met) <= 2:
            return 404, "NoSuchKey"
        return (412, "PreconditionFailed") if met[-1] == _OTHER_TAG else None

    proxy.rule = collected_once
    store.put("key", b"1")
    store.move("key", "aside")
    deletions = [asked for asked in proxy.asked if asked.method == "DELETE" and "/run/key" in asked.path]
    assert [asked.headers.get("if-match") is not None for asked in deletions] == [True]


def test_a_server_that_never_replaces_is_no_other_writer(store: ObjectStore, proxy: ObjectProxy) -> None:
    """As Ceph in a bucket that keeps versions."""
    store.put("latest", b"step-1")
    proxy.rule = lambda asked: (412, "PreconditionFailed") if "if-match" in asked.headers else None
    with pytest.raises(InvalidError, match="without versions"):
        store.replace("latest", b"step-2", b"step-1")
    assert store.get("latest", 10) == b"step-1"


def test_a_bucket_that_keeps_versions_is_said_once(objects: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    client, name = objects.client(), f"{BUCKET}-versions"
    client.create_bucket(Bucket=name)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    plain = ObjectStore(objects.new_url(), settings=objects.settings())
    plain.put("key", b"1")
    plain.delete(["key"])
    assert not caplog.records
    for number in range(2):
        store = ObjectStore(f"s3://{name}/{number}", settings=objects.settings())
        store.put_if_absent("key", b"1")
        store.delete(["key"])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"s3://{name} keeps versions")
    assert client.list_object_versions(Bucket=name, Prefix="0/key")["Versions"]


def test_a_server_that_sends_whole_objects(store: ObjectStore, proxy: ObjectProxy) -> None:
    """As `rclone serve s3` does: it does not say that what it sends is a part."""
    data = random.Random(1).randbytes(3 * MIB + 1)
    store.put("key", data)
    proxy.rule = lambda asked: asked.headers.pop("range", None) and None
    proxy.asked.clear()
    for _ in range(2):
        ranges = [(0, 1), (5, MIB), (2 * MIB, 3 * MIB + 1), (7, 9)]
        buffers = [bytearray(stop - start) for start, stop in ranges]
        store.read_into("key", ranges, [memoryview(buffer) for buffer in buffers])
        assert buffers == [data[start:stop] for start, stop in ranges]
    assert store.holds("key", memoryview(data))
    with pytest.raises(CorruptError, match="key"):
        store.read_into("key", [(MIB, 3 * MIB + 2)], [memoryview(bytearray(2 * MIB + 2))])
    # It is asked for parts once, in two requests side by side.
    assert sum(asked.method == "GET" for asked in proxy.asked) <= 5


def test_a_server_that_sends_whole_objects_has_time_for_them(
    store: ObjectStore, proxy: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on the time of a `get` is of objects whose size nobody knows; here the end of the range is known."""
    monkeypatch.setattr(reading, "_TIMED_BYTES_MAX", MIB)
    store.put("key", bytes(3 * MIB))
    proxy.rule = lambda asked: asked.headers.pop("range", None) and None
    ask, timed = store.clients.ask, list[int]()

    def recorded(doing: str, where: str, call: Any, bytes_moved: int = 0, **options: bool) -> Any:
        timed.append(bytes_moved)
        return ask(doing, where, call, bytes_moved, **options)

    monkeypatch.setattr(store.clients, "ask", recorded)
    store.read_into("key", [(3 * MIB - 1, 3 * MIB)], [memoryview(bytearray(1))])
    assert max(timed) == 3 * MIB


def test_a_refusal_of_a_key_with_any_digits_is_no_end_of_an_object(store: ObjectStore, proxy: ObjectProxy) -> None:
    store.put("a/416/key", b"0123456789")
    proxy.rule = lambda asked: (403, "AccessDenied") if asked.method == "GET" else None
    with pytest.raises(InvalidError, match="AccessDenied"):
        store.read_into("a/416/key", [(0, 1)], [memoryview(bytearray(1))])
