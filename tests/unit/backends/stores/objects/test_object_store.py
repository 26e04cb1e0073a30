"""What a server may do to the store of objects, each on a real server behind a proxy."""

from __future__ import annotations

import hashlib
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.backends.stores.objects.conditional_delete import _OTHER_TAG
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError, UnavailableError
from holdfast.pieces import PieceWriter, TensorPiece
from holdfast.settings import PAGE_BYTES, ObjectSettings, Settings
from tests.servers.server import S3Server
from tests.support.object_proxy import CUT, LOST, Asked, ObjectProxy, object_proxy
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, ObjectServer

TLS = Path(__file__).parents[4] / "fixtures" / "tls"


@pytest.fixture
def proxy(objects: ObjectServer) -> Iterator[ObjectProxy]:
    with object_proxy(objects.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(objects: ObjectServer, proxy: ObjectProxy) -> ObjectStore:
    return ObjectStore(objects.new_url(), settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))


def first(method: str, answer: object, part: str = "") -> object:
    """Return a rule for the first request of a method; later ones are passed on."""
    left = [answer]

    def rule(asked: Asked) -> object:
        return left.pop() if left and asked.method == method and part in asked.path else None

    return rule


def upload(store: ObjectStore, key: str, data: bytes) -> None:
    upload = store.upload(key, len(data), PAGE_BYTES)
    for at in range(0, len(data), PAGE_BYTES):
        upload.write(at, memoryview(data)[at : at + PAGE_BYTES])
    try:
        upload.complete()
    finally:
        upload.abort()


def lent_upload(store: ObjectStore, key: str, data: bytes) -> None:
    store.lent_upload(key, [memoryview(data)[:100], memoryview(data)[100:]]).complete()


def test_own_object_after_a_lost_reply_is_a_success(store: ObjectStore, proxy: ObjectProxy) -> None:
    for number, put in enumerate((store.put_if_absent, partial(upload, store), partial(lent_upload, store))):
        key = f"key-{number}"
        proxy.rule = first("PUT", LOST, key)
        with pytest.raises(TemporaryError) as lost:
            put(key, b"mine" * 2000)
        assert lost.value.may_take_effect
        put(key, b"mine" * 2000)
        with pytest.raises(ConflictError, match=key):
            put(key, b"them" * 2000)
        assert store.get(key, 8000) == b"mine" * 2000


def test_an_object_without_a_checksum_for_tag_is_read_back(store: ObjectStore, proxy: ObjectProxy) -> None:
    data = bytes(range(256)) * 64
    # A multipart upload has a tag that is no checksum of the content.
    client = S3Server(proxy.endpoint, ACCESS_KEY, SECRET_KEY).client()
    name = f"{store.address.prefix}many"
    begun = client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key=name, UploadId=begun, PartNumber=1, Body=data)
    client.complete_multipart_upload(
        Bucket=BUCKET, Key=name, UploadId=begun, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    )
    upload(store, "many", data)
    assert proxy.count("GET", "many") == 1
    with pytest.raises(ConflictError):
        upload(store, "many", data[:-1] + b"x")


def test_busy_is_no_conflict(store: ObjectStore, proxy: ObjectProxy) -> None:
    proxy.rule = first("PUT", (409, "ConditionalRequestConflict"), "key")
    with pytest.raises(TemporaryError, match="no such object"):
        store.put_if_absent("key", b"mine")
    store.put_if_absent("key", b"mine")


@pytest.mark.parametrize(
    ("status", "code", "kind", "what"),
    (
        (503, "SlowDown", TemporaryError, "SlowDown"),
        (500, "InternalError", TemporaryError, "InternalError"),
        (403, "RequestTimeTooSkewed", InvalidError, "clock"),
        (403, "AccessDenied", InvalidError, "policy"),
        (403, "InvalidAccessKeyId", InvalidError, "does not know these credentials"),
        (403, "SignatureDoesNotMatch", InvalidError, "secret key"),
        (400, "ExpiredToken", UnavailableError, "renew"),
        (400, "AuthorizationHeaderMalformed", InvalidError, "AWS_REGION"),
        (404, "NoSuchBucket", InvalidError, "create the bucket"),
        (501, "NotImplemented", InvalidError, "choose another"),
        (413, "EntityTooLarge", InvalidError, "more ranks"),
        (401, "AuthenticationRequired", InvalidError, "no credentials"),
        (403, "AuthenticationFailed", InvalidError, "clock"),
        (403, "RetentionPolicyNotMet", InvalidError, "retention"),
        (409, "BlobImmutableDueToPolicy", InvalidError, "retention"),
        (409, "PublicAccessNotPermitted", InvalidError, "no credentials"),
        (409, "ContainerBeingDeleted", InvalidError, "being deleted"),
        (412, "LeaseIdMissing", InvalidError, "lease"),
    ),
)
def test_a_refusal_is_a_typed_error(
    store: ObjectStore, proxy: ObjectProxy, status: int, code: str, kind: type[CheckpointError], what: str
) -> None:
    proxy.rule = lambda asked: (status, code) if "key" in asked.path else None
    for call in (lambda: store.put("key", b"1"), lambda: store.get("key", 10), lambda: upload(store, "key", b"1")):
        with pytest.raises(kind, match=what) as raised:
            call()
        assert f"{store.url}/key" in str(raised.value)
        assert code in str(raised.value)
        # Nothing of the client's own exception is left to be printed.
        assert raised.value.__cause__ is None
        assert raised.value.__context__ is None


def test_a_panic_of_the_client_is_an_error(store: ObjectStore) -> None:
    class PanicException(BaseException):
        """As the client's, which no module exports."""

    def panic(*_: object) -> None:
        raise PanicException("request must be valid")

    with pytest.raises(CheckpointError, match="request must be valid"):
        store.clients.ask("sign", store.url, panic)
    with pytest.raises(KeyboardInterrupt):
        store.clients.ask("sign", store.url, lambda *_: signal.raise_signal(signal.SIGINT))


def test_what_a_server_says_is_cut_and_printable(store: ObjectStore, proxy: ObjectProxy) -> None:
    said = f"\x1b[31mred \x07 {SECRET_KEY} {ACCESS_KEY} " + "x" * 5000
    proxy.rule = lambda asked: (403, f"AccessDenied</Code><Message>{said}</Message><Code>")
    with pytest.raises(InvalidError) as raised:
        store.get("key", 10)
    text = "".join(traceback.format_exception(raised.value))
    assert "red" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert SECRET_KEY not in text
    assert ACCESS_KEY not in text
    assert len(str(raised.value)) < 1000


def test_no_request_is_made_twice_by_the_client(store: ObjectStore, proxy: ObjectProxy) -> None:
    for answer in ((503, "SlowDown"), (500, "InternalError"), CUT):
        before = proxy.count("GET", "key")
        proxy.rule = lambda asked, answer=answer: answer if "key" in asked.path else None
        with pytest.raises(TemporaryError):
            store.get("key", 10)
        assert proxy.count("GET", "key") == before + 1


def test_a_store_that_has_listed_asks_no_more_whether_there_is_a_bucket(store: ObjectStore, proxy: ObjectProxy) -> None:
    assert store.folders() == []
    with pytest.raises(MissingError):
        store.size("absent")
    assert [asked.method for asked in proxy.asked] == ["GET", "HEAD"]


def test_no_server_is_temporary_and_has_no_effect(objects: ObjectServer) -> None:
    with object_proxy(objects.endpoint) as gone:
        endpoint = gone.endpoint
    store = ObjectStore(objects.new_url(), settings=Settings(object_store=ObjectSettings(endpoint=endpoint)))
    with pytest.raises(TemporaryError) as raised:
        store.put("key", b"1")
    assert not raised.value.may_take_effect


def test_silence_is_ended(objects: ObjectServer, proxy: ObjectProxy) -> None:
    settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint, silence_timeout_seconds=0.5))
    store = ObjectStore(objects.new_url(), settings=settings)
    silent = threading.Event()
    proxy.rule = lambda asked: silent.wait(60) and None
    try:
        with pytest.raises(TemporaryError, match="no answer came in time") as raised:
            store.get("key", 10)
    finally:
        silent.set()
    assert raised.value.may_take_effect
    assert raised.value.is_throttled


class Liars:
    """Servers that ignore a condition."""

    @staticmethod
    def of_creates(asked: Asked) -> None:
        asked.headers.pop("if-none-match", None)

    @staticmethod
    def of_deletions(asked: Asked) -> None:
        if asked.method == "DELETE":
            asked.headers.pop("if-match", None)


def test_a_server_that_takes_both_creates_is_refused(objects: ObjectServer, proxy: ObjectProxy) -> None:
    proxy.rule = Liars.of_creates
    url = objects.new_url()
    settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint))
    store = ObjectStore(url, settings=settings)
    for _ in range(2):
        with pytest.raises(InvalidError, match="single_writer=True"):
            store.put_if_absent("manifest.json", b"1")
    assert objects.keys(url) == []
    alone = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint, single_writer=True))
    ObjectStore(url, settings=alone).put_if_absent("manifest.json", b"1")
    assert objects.keys(url) == ["manifest.json"]


def test_no_way_to_save_commits_on_a_server_that_takes_both_creates(objects: ObjectServer, proxy: ObjectProxy) -> None:
    proxy.rule = Liars.of_creates
    settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint), reports=False)
    weights = torch.arange(10_000.0)

    def save_pieces(url: str) -> None:
        writer = PieceWriter(url, settings=settings)
        (ticket,) = writer.open(1)
        writer.finish([writer.write(ticket, [TensorPiece("w", (10_000,), (0,), weights)], {})])

    for save in (lambda url: holdfast.save(url, {"w": weights}, settings=settings, process_group=False), save_pieces):
        url = objects.new_url()
        with pytest.raises(InvalidError, match="single_writer=True"):
            save(url)
        assert objects.keys(url) == []


def test_what_another_rank_has_asked_is_not_asked_again(objects: ObjectServer, proxy: ObjectProxy) -> None:
    settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint))
    for number, ask in enumerate((RetryingStore.trust_exclusive_creates, RetryingStore.require_exclusive_creates)):
        store = RetryingStore(ObjectStore(objects.new_url(), settings=settings), settings)
        ask(store)
        asked = proxy.count("PUT", "probe-")
        assert asked == 2 * number
        store.put_if_absent("manifest.json", b"1")
        assert proxy.count("PUT", "probe-") == asked


def test_a_collection_that_removes_a_probe_makes_no_server_a_liar(objects: ObjectServer, proxy: ObjectProxy) -> None:
    removed: list[str] = []

    def collect(asked: Asked) -> None:
        # Before the second create of the first probe.
        if asked.method == "PUT" and "probe-" in asked.path and proxy.count("PUT", "probe-") == 2:
            removed.append(asked.path)
            objects.remove(f"s3:/{asked.path.partition('?')[0]}")

    proxy.rule = collect
    store = ObjectStore(objects.new_url(), settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))
    store.put_if_absent("manifest.json", b"1")
    assert len(removed) == 1 and proxy.count("PUT", "probe-") == 4
    assert [entry.key for entry in store.list()] == ["manifest.json"]


def test_a_server_is_asked_once(store: ObjectStore, proxy: ObjectProxy) -> None:
    store.put_if_absent("a", b"1")
    probes = proxy.count("PUT", "reports/probe-")
    store.put_if_absent("b", b"1")
    assert probes == proxy.count("PUT", "reports/probe-") == 2
    assert sorted(entry.key for entry in store.list()) == ["a", "b"]


@pytest.mark.parametrize("is_liar", (False, True))
def test_move_takes_only_what_it_has_seen(objects: ObjectServer, proxy: ObjectProxy, is_liar: bool) -> None:
    # The answer about a bucket is remembered, so each kind of server needs one of its own.
    bucket = f"{BUCKET}-{'liar' if is_liar else 'honest'}"
    objects.client().create_bucket(Bucket=bucket)
    url = f"s3://{bucket}/run"
    store = ObjectStore(url, settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))
    lie = Liars.of_deletions if is_liar else lambda _: None
    proxy.rule = lie
    store.put("warm", b"up")
    store.move("warm", "moved")
    store.put("key", b"old")
    others = [b"new"]

    def another_writer(asked: Asked) -> None:
        lie(asked)
        # Between the copy and the deletion: with the copy the last thing before it is a PUT of the new key.
        if asked.method == "PUT" and "/run/aside" in asked.path and others:
            objects.client().put_object(Bucket=bucket, Key="run/key", Body=others.pop())

    proxy.rule = another_writer
    store.move("key", "aside")
    assert store.get("aside", 10) == b"new"
    assert sorted(entry.key for entry in store.list()) == ["aside", "moved"]
    on_condition = [asked for asked in proxy.asked if asked.method == "DELETE" and "/run/key" in asked.path]
    assert len(on_condition) == (0 if is_liar else 2)


@pytest.mark.parametrize("answer", ((503, "SlowDown"), LOST))
def test_one_busy_moment_does_not_tell_how_a_server_deletes(
    objects: ObjectServer, proxy: ObjectProxy, answer: tuple[int, str] | str
) -> None:
    bucket = f"{BUCKET}-{'lost' if answer == LOST else 'busy'}"
    objects.client().create_bucket(Bucket=bucket)
    store = ObjectStore(f"s3://{bucket}/run", settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))
    store.put("key", b"1")
    left = [answer]

    def keeps_conditions(asked: Asked) -> tuple[int, str] | str | None:
        # The server of the tests takes no signed URL, so this one carries its deletions out.
        if asked.method != "DELETE":
            return None
        if left:
            return left.pop()
        if asked.headers["if-match"] == _OTHER_TAG:
            return 412, "PreconditionFailed"
        objects.client().delete_object(Bucket=bucket, Key=asked.path.partition("?")[0].removeprefix(f"/{bucket}/"))
        return 200, "Deleted"

    proxy.rule = keeps_conditions
    with suppress(TemporaryError):
        store.move("key", "aside")
    store.put("next", b"2")
    proxy.asked.clear()
    store.move("next", "aside")
    assert not left
    deletions = [asked for asked in proxy.asked if asked.method == "DELETE" and "/run/next" in asked.path]
    assert [asked.headers.get("if-match") is not None for asked in deletions] == [True]


@pytest.mark.parametrize("asked_before", (1, 2))
def test_a_collection_that_removes_a_probe_does_not_tell_how_a_server_deletes(
    objects: ObjectServer, proxy: ObjectProxy, asked_before: int
) -> None:
    bucket = f"{BUCKET}-collected-{asked_before}"
    objects.client().create_bucket(Bucket=bucket)
    store = ObjectStore(f"s3://{bucket}/run", settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))
    collected: list[str] = []

    def keeps_conditions(asked: Asked) -> tuple[int, str] | None:
        if asked.method != "DELETE":
            return None
        key = asked.path.partition("?")[0].removeprefix(f"/{bucket}/")
        if "probe-" in key and proxy.count("DELETE", "probe-") == asked_before and not collected:
            collected.append(key)
        if key in collected:
            return 404, "NoSuchKey"
        if asked.headers["if-match"] == _OTHER_TAG:
            return 412, "PreconditionFailed"
        objects.client().delete_object(Bucket=bucket, Key=key)
        return 200, "Deleted"

    proxy.rule = keeps_conditions
    for key in ("key", "next"):
        store.put(key, b"1")
        proxy.asked.clear()
        store.move(key, "aside")
    assert len(collected) == 1
    deletions = [asked for asked in proxy.asked if asked.method == "DELETE" and "/run/next" in asked.path]
    assert [asked.headers.get("if-match") is not None for asked in deletions] == [True]


def test_move_replaces_only_what_was_there_before(
    store: ObjectStore, proxy: ObjectProxy, objects: ObjectServer
) -> None:
    """As in an overwrite: whoever takes over removes what is prepared, and only then stores a manifest."""
    store.put("manifest.json", b"seen")
    store.put("next", b"prepared by a process that stops")
    taken_over = []

    def take_over(asked: Asked) -> None:
        if asked.method == "PUT" and "manifest.json" in asked.path and not taken_over:
            taken_over.append(True)
            client = objects.client()
            client.delete_object(Bucket=BUCKET, Key=f"{store.address.prefix}next")
            client.put_object(Bucket=BUCKET, Key=f"{store.address.prefix}manifest.json", Body=b"of the new holder")

    proxy.rule = take_over
    with pytest.raises(CheckpointError):
        store.move("next", "manifest.json")
    assert store.get("manifest.json", 100) == b"of the new holder"


@pytest.mark.parametrize("seen", (None, b"step-1"))
def test_what_comes_between_look_and_replacement_stays(
    store: ObjectStore, proxy: ObjectProxy, objects: ObjectServer, seen: bytes | None
) -> None:
    if seen is not None:
        store.put("latest", seen)

    def another_writer(asked: Asked) -> None:
        if asked.method == "PUT" and "latest" in asked.path:
            objects.client().put_object(Bucket=BUCKET, Key=f"{store.address.prefix}latest", Body=b"step-3")

    proxy.rule = another_writer
    with pytest.raises(ConflictError, match="latest"):
        store.replace("latest", b"step-2", seen)
    assert store.get("latest", 10) == b"step-3"


def test_a_replacement_asks_once_for_what_was_read(
    store: ObjectStore, proxy: ObjectProxy, objects: ObjectServer
) -> None:
    store.put("latest", b"step-1")
    assert store.get("latest", 10) == b"step-1"
    proxy.asked.clear()
    store.replace("latest", b"step-2", b"step-1")
    assert [asked.method for asked in proxy.asked] == ["PUT"], proxy.asked
    assert store.get("latest", 10) == b"step-2"
    objects.client().put_object(Bucket=BUCKET, Key=f"{store.address.prefix}latest", Body=b"step-3")
    with pytest.raises(ConflictError, match="latest"):
        store.replace("latest", b"step-4", b"step-2")
    assert store.get("latest", 10) == b"step-3"


def test_how_a_server_compares_tags_is_learnt_once(store: ObjectStore, proxy: ObjectProxy) -> None:
    def takes_bare_tags(asked: Asked) -> object:
        tag = asked.headers.get("if-match", "")
        # The real server behind wants the quotes.
        asked.headers |= {"if-match": f'"{tag}"'} if tag else {}
        return (412, "PreconditionFailed") if tag.startswith('"') else None

    store.put("latest", b"step-1")
    proxy.rule = takes_bare_tags
    for number in (2, 3):
        seen = store.get("latest", 10)
        proxy.asked.clear()
        store.replace("latest", f"step-{number}".encode(), seen)
        # At first it is refused, looked at, and sent once more.
        assert [asked.method for asked in proxy.asked] == (["PUT", "HEAD", "PUT"] if number == 2 else ["PUT"])
    assert store.get("latest", 10) == b"step-3"


def test_own_replacement_after_a_lost_reply_is_a_success(store: ObjectStore, proxy: ObjectProxy) -> None:
    store.put("latest", b"step-1")
    proxy.rule = first("PUT", LOST, "latest")
    with pytest.raises(TemporaryError):
        store.replace("latest", b"step-2", b"step-1")
    store.replace("latest", b"step-2", b"step-1")
    assert store.get("latest", 10) == b"step-2"


def test_content_is_signed_over_plain_http_alone(
    objects: ObjectServer, proxy: ObjectProxy, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("key", b"content")
    (plain,) = [asked for asked in proxy.asked if asked.method == "PUT"]
    assert plain.headers["x-amz-content-sha256"] == hashlib.sha256(b"content").hexdigest()
    proxy.asked.clear()
    with object_proxy(objects.endpoint, TLS / "server.pem") as secure:
        settings = Settings(object_store=ObjectSettings(endpoint=secure.endpoint, ca_file=str(TLS / "authority.pem")))
        over_tls = ObjectStore(store.url, settings=settings)
        over_tls.put("key", b"content")
        assert over_tls.get("key", 10) == b"content"
        # The deletion on condition goes another way, and trusts the same authority.
        over_tls.move("key", "moved")
        assert [each.headers["x-amz-content-sha256"] for each in secure.asked if each.method == "PUT"][:1] == [
            "UNSIGNED-PAYLOAD"
        ]
        assert secure.count("DELETE", "/key") == 1
        stranger = ObjectStore(store.url, settings=Settings(object_store=ObjectSettings(endpoint=secure.endpoint)))
        with pytest.raises(CheckpointError):
            stranger.get("moved", 10)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(TLS / "authority.pem"))
        known = ObjectStore(store.url, settings=Settings(object_store=ObjectSettings(endpoint=secure.endpoint)))
        assert known.get("moved", 10) == b"content"


def test_what_is_public_is_read_without_a_signature(
    store: ObjectStore, proxy: ObjectProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("key", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint, anonymous=True))
    assert ObjectStore(store.url, settings=settings).get("key", 1) == b"1"
    assert "authorization" in proxy.asked[0].headers
    assert "authorization" not in proxy.asked[-1].headers


def test_a_key_of_the_key_service_encrypts(store: ObjectStore, proxy: ObjectProxy) -> None:
    settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint, kms_key="alias/training"))
    ObjectStore(store.url, settings=settings).put("key", b"1")
    headers = proxy.asked[-1].headers
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/training"


def test_what_is_too_large_is_refused_before_it_is_read(store: ObjectStore, proxy: ObjectProxy) -> None:
    store.put("key", bytes(1 << 20))
    with pytest.raises(CorruptError, match="at most 10"):
        store.get("key", 10)


def test_a_bucket_that_is_not_there(objects: ObjectServer) -> None:
    store = ObjectStore("s3://no-such-bucket-here/run", settings=objects.settings())
    calls = (
        lambda: store.size("key"),
        lambda: store.get("key", 10),
        lambda: list(store.list()),
        lambda: store.folders(),
        lambda: store.put("key", b"1"),
        lambda: store.delete(["key"]),
        lambda: store.put_if_absent("key", b"1"),
    )
    for call in calls:
        with pytest.raises(InvalidError, match="create the bucket"):
            call()


def test_another_region(objects: ObjectServer) -> None:
    settings = Settings(object_store=ObjectSettings(endpoint=objects.endpoint, region="eu-west-1"))
    with pytest.raises(InvalidError, match="AWS_REGION"):
        ObjectStore(objects.new_url(), settings=settings).get("key", 10)


def test_a_key_too_long_with_its_folder(objects: ObjectServer) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{'x' * 500}", settings=objects.settings())
    with pytest.raises(InvalidError, match="1024"):
        store.put("/".join(["y" * 100] * 6), b"1")


def test_an_object_larger_than_one_request_takes() -> None:
    """S3 and Azure take it in parts (`test_multipart.py`); nothing is sent before the first of them."""
    with pytest.raises(InvalidError, match="more ranks"):
        ObjectStore("gs://bucket/folder", settings=Settings()).upload("key", (5 << 40) + PAGE_BYTES, PAGE_BYTES)
    for url in ("s3://bucket/folder", "az://container/folder"):
        store = ObjectStore(url, settings=Settings())
        assert store.traits.object_bytes_max == ObjectSettings().bytes_in_flight_max
        store.upload("key", (5 << 30) + 1, 5 << 20).abort()


def test_objects_that_no_key_names_are_left_out(objects: ObjectServer) -> None:
    url = objects.new_url()
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    for name in ("a b", ".hidden", "folder/", "ok/x", "folder/ü"):
        objects.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"1")
    store = ObjectStore(url, settings=objects.settings())
    assert [entry.key for entry in store.list() if entry.key != "folder"] == ["ok/x"]
    assert store.folders() == ["folder", "ok"]


def test_a_listing_of_many_pages(objects: ObjectServer, proxy: ObjectProxy) -> None:
    url = objects.new_url()
    client, prefix = objects.client(), url.removeprefix(f"s3://{BUCKET}/")
    for number in range(1003):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/k{number:04d}", Body=b"")
    store = ObjectStore(url, settings=Settings(object_store=ObjectSettings(endpoint=proxy.endpoint)))
    keys = [entry.key for entry in store.list()]
    assert keys == [f"k{number:04d}" for number in range(1003)]
    assert [entry.key for entry in store.list(after="k0998", up_to="k1001")] == ["k0999", "k1000", "k1001"]
    assert store.traits.page_entries == 1000
    proxy.asked.clear()
    assert [entry.key for entry in store.list(after="k000", up_to="k0999")] == keys[:1000]
    assert [entry.key for entry in store.list(after="k0001", up_to="k1001")] == keys[2:1002]
    assert proxy.count("GET", "list-type=2") == 2, "a page each: none behind the last key that is wanted"
    store.delete(keys)
    assert list(store.list()) == []
