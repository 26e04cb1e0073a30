"""Objects larger than one request, sent in parts: the object is whole or absent, and no part is left."""

from __future__ import annotations

import hashlib
import hmac
import random
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.backends.stores.objects.parts_of_s3 import PartsOfBucket
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.errors import ConflictError, InvalidError, UnavailableError
from holdfast.settings import MIB, ObjectSettings, Settings
from tests.support.object_proxy import CUT, LOST, Asked, ObjectProxy, object_proxy
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, ObjectServer

PART = 5 * MIB
DATA = random.Random(3).randbytes(2 * PART + 70_000)


@pytest.fixture
def proxy(objects: ObjectServer) -> Iterator[ObjectProxy]:
    with object_proxy(objects.endpoint) as proxy:
        yield proxy


def store_at(url: str, endpoint: str) -> RetryingStore:
    settings = Settings(object_store=ObjectSettings(endpoint=endpoint, retry_seconds_per_call=20))
    store = ObjectStore(url, settings=settings)
    store.traits = replace(store.traits, object_bytes_max=PART)
    return RetryingStore(store, settings)


def uploaded(store: RetryingStore, key: str, data: bytes = DATA) -> None:
    upload = store.upload(key, len(data), PART)
    try:
        for start in range(0, len(data), PART):
            part = memoryview(data)[start : start + PART]
            room = upload.room(start, len(part))
            assert room is not None
            room[:] = part
            upload.write(start, room)
        upload.complete()
    except BaseException:
        upload.abort()
        raise


def uploads(objects: ObjectServer, url: str) -> list[str]:
    """Return the keys of uploads that nobody has ended, by boto3."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = objects.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
    return [each["Key"].removeprefix(prefix) for each in found]


def test_an_object_in_parts_is_whole(objects: ObjectServer) -> None:
    url = objects.new_url()
    store = store_at(url, objects.endpoint)
    uploaded(store, "a/large")
    assert store.get("a/large", len(DATA)) == DATA
    assert uploads(objects, url) == []
    with pytest.raises(ConflictError, match="another writer stored it"):
        uploaded(store, "a/large", DATA[::-1])
    assert store.get("a/large", len(DATA)) == DATA and uploads(objects, url) == []
    uploaded(store, "a/large")  # The same bytes count as ours: an earlier reply may have been lost.
    assert uploads(objects, url) == []


@pytest.mark.parametrize("fault", [LOST, CUT])
@pytest.mark.parametrize("method, part", [("POST", "?uploads="), ("PUT", "partNumber=2"), ("POST", "?uploadId=")])
def test_a_fault_is_mended(objects: ObjectServer, proxy: ObjectProxy, fault: str, method: str, part: str) -> None:
    url, left = objects.new_url(), [fault]

    def once(asked: Asked) -> str | None:
        return left.pop() if left and asked.method == method and part in asked.path else None

    proxy.rule = once
    store = store_at(url, proxy.endpoint)
    uploaded(store, "large")
    assert not left and store.get("large", len(DATA)) == DATA
    # The id of a lost beginning is known to nobody: what aborts the uploads of a folder finds it.
    lost = fault == LOST and "uploads" in part
    assert store.abort_uploads("", lambda key: key == "large", dry_run=True) == len(uploads(objects, url)) == lost
    assert store.abort_uploads("", lambda key: key == "other") == 0
    assert store.abort_uploads("", lambda key: key == "large") == lost
    assert uploads(objects, url) == []


def test_what_fails_for_good_leaves_no_part(objects: ObjectServer, proxy: ObjectProxy) -> None:
    url = objects.new_url()

    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (403, "AccessDenied") if "partNumber=2" in asked.path else None

    proxy.rule = refuse
    with pytest.raises(InvalidError, match=r"large \(part 2\): AccessDenied"):
        uploaded(store_at(url, proxy.endpoint), "large")
    assert objects.keys(url) == [] and uploads(objects, url) == []


def test_an_upload_that_was_aborted_meanwhile_fails(objects: ObjectServer) -> None:
    url = objects.new_url()
    store = store_at(url, objects.endpoint)
    upload = store.upload("large", PART + 1, PART)
    upload.write(0, memoryview(DATA)[:PART])
    upload.write(PART, memoryview(DATA)[:1])
    assert store.abort_uploads("", lambda key: True) == 1
    with pytest.raises(UnavailableError, match="has aborted it; begin again"):
        upload.complete()
    upload.abort()
    assert objects.keys(url) == []


def test_parts_that_a_server_would_refuse(objects: ObjectServer) -> None:
    store = store_at(objects.new_url(), objects.endpoint)
    for size, part in ((PART * 2, PartsOfBucket.part_bytes_min - 4096), (PART * 10_001, PART)):
        with pytest.raises(InvalidError, match="expected at least 5242880, and at most 10000 parts"):
            store.upload("large", size, part)


def test_a_server_without_the_condition_still_joins(objects: ObjectServer, proxy: ObjectProxy) -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (501, "NotImplemented") if asked.headers.get("if-none-match") and asked.method == "POST" else None

    proxy.rule = refuse
    url = objects.new_url()
    store = store_at(url, proxy.endpoint)
    uploaded(store, "large")
    assert store.get("large", len(DATA)) == DATA and uploads(objects, url) == []


def test_an_end_that_the_server_does_not_confirm_is_asked_for_again(objects: ObjectServer, proxy: ObjectProxy) -> None:
    """A server sends its status, then blanks while it joins the parts. It may fail, or die, after that."""
    answers = [
        b"<?xml version='1.0'?>" + 500 * b" ",
        b"<?xml version='1.0'?>" + 500 * b" " + b"<Error><Code>x</Code></Error>",
    ]

    def cut_off(asked: Asked) -> bytes | None:
        return answers.pop() if answers and asked.method == "POST" and "?uploadId=" in asked.path else None

    proxy.rule = cut_off
    url = objects.new_url()
    store = store_at(url, proxy.endpoint)
    uploaded(store, "large")
    assert not answers and store.get("large", len(DATA)) == DATA and uploads(objects, url) == []


def test_another_copy_that_was_faster_leaves_no_parts_of_this_one(objects: ObjectServer, proxy: ObjectProxy) -> None:
    url = objects.new_url()

    def faster(asked: Asked) -> tuple[int, str] | None:
        if asked.method != "POST" or "?uploadId=" not in asked.path:
            return None
        objects.client().put_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/large", Body=DATA)
        return 412, "PreconditionFailed"

    proxy.rule = faster
    uploaded(store_at(url, proxy.endpoint), "large")
    assert objects.keys(url) == ["large"] and uploads(objects, url) == []


def test_the_condition_is_not_dropped_for_a_key_that_looks_like_a_status(
    objects: ObjectServer, proxy: ObjectProxy
) -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (403, "AccessDenied") if asked.headers.get("if-none-match") and asked.method == "POST" else None

    proxy.rule = refuse
    url = objects.new_url()
    with pytest.raises(InvalidError, match="AccessDenied"):
        uploaded(store_at(url, proxy.endpoint), "step-501/large")
    assert objects.keys(url) == [] and uploads(objects, url) == []


def test_the_second_page_of_uploads_begins_where_the_first_ends(objects: ObjectServer, proxy: ObjectProxy) -> None:
    url = objects.new_url()
    prefix = f"{url.removeprefix(f's3://{BUCKET}/')}/"
    begun = "<Upload><Key>{}</Key><UploadId>{}</UploadId></Upload>"
    first = (
        "<R><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextKeyMarker>{}a%2Bb</NextKeyMarker>"
        "<NextUploadIdMarker>1</NextUploadIdMarker>" + begun + "</R>"
    ).format(prefix, f"{prefix}a%2Bb", 1)
    second = "<R><EncodingType>url</EncodingType>" + begun.format(f"{prefix}c%2Bd", 2) + "</R>"

    def page(asked: Asked) -> bytes | None:
        if "uploads=" not in asked.path:
            return None
        if "key-marker=" not in asked.path:
            return first.encode()
        return second.encode() if "a%2Bb&" in asked.path else b"<R></R>"

    proxy.rule = page
    seen: list[str] = []
    store = store_at(url, proxy.endpoint)
    assert store.abort_uploads("", lambda key: seen.append(key) is None, dry_run=True) == 2
    assert seen == ["a+b", "c+d"]


def test_credentials_of_a_profile_sign_too(
    objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[other]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    store = store_at(objects.new_url(), objects.endpoint)
    uploaded(store, "large")
    assert store.get("large", len(DATA)) == DATA


def test_the_secret_key_is_in_no_error(objects: ObjectServer, proxy: ObjectProxy) -> None:
    signatures: list[str] = []

    def refuse(asked: Asked) -> tuple[int, str] | None:
        if "partNumber" not in asked.path:
            return None
        signatures.append(asked.headers["authorization"].rpartition("Signature=")[2])
        return 403, "SignatureDoesNotMatch"

    proxy.rule = refuse
    store = store_at(objects.new_url(), proxy.endpoint)
    with pytest.raises(InvalidError, match="the secret key is not that of the access key") as caught:
        uploaded(store, "large")
    shown = "".join(traceback.format_exception(caught.value)) + repr(store.__dict__)
    assert len(signatures) == 1
    assert not [secret for secret in (SECRET_KEY, ACCESS_KEY, *signatures) if secret in shown]


def require_signed(asked: Asked) -> None:
    """Compute Signature Version 4 from the request as a server sees it."""
    _, stated = asked.headers["authorization"].split(" ", 1)
    found = dict(part.strip().split("=", 1) for part in stated.split(","))
    names = found["SignedHeaders"].split(";")
    assert {"host", "x-amz-content-sha256", "x-amz-date"} <= {*names}
    path, _, query = asked.path.partition("?")
    lines = "".join(f"{name}:{asked.headers[name].strip()}\n" for name in names)
    canonical = "\n".join((asked.method, path, "&".join(sorted(query.split("&"))), lines, ";".join(names)))
    canonical += f"\n{asked.headers['x-amz-content-sha256']}"
    access, *scope = found["Credential"].split("/")
    assert access == ACCESS_KEY and scope[-1] == "aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(("AWS4-HMAC-SHA256", asked.headers["x-amz-date"], "/".join(scope), digest))
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    assert hmac.digest(key, to_sign.encode(), "sha256").hex() == found["Signature"]


def test_every_request_of_an_upload_is_signed_as_it_is_sent(objects: ObjectServer, proxy: ObjectProxy) -> None:
    uploaded(store_at(f"{objects.new_url()}/a+b=c@d", proxy.endpoint), "large")
    signed = [asked for asked in proxy.asked if "uploadId" in asked.path or "uploads" in asked.path]
    assert {asked.method for asked in signed} == {"POST", "PUT"} and len(signed) == 5
    for asked in signed:
        require_signed(asked)
    parts = [DATA[start : start + PART] for start in range(0, len(DATA), PART)]
    stated = {asked.headers["x-amz-content-sha256"] for asked in signed if asked.method == "PUT"}
    assert stated == {hashlib.sha256(part).hexdigest() for part in parts}
