"""URLs of object stores."""

from __future__ import annotations

import pytest

from holdfast.backends.stores.objects.address import address_of
from holdfast.errors import InvalidError
from holdfast.settings import ObjectSettings


@pytest.mark.parametrize(
    ("url", "prefix", "shown"),
    (
        ("s3://bucket", "", "s3://bucket"),
        ("s3://bucket/", "", "s3://bucket"),
        ("gs://my.bucket_1/a/b", "a/b/", "gs://my.bucket_1/a/b"),
        ("az://container/a=1/b@2+3/", "a=1/b@2+3/", "az://container/a=1/b@2+3"),
    ),
)
def test_a_folder_in_a_bucket(url: str, prefix: str, shown: str) -> None:
    address = address_of(url)
    assert (address.prefix, address.url) == (prefix, shown)


@pytest.mark.parametrize(
    "url",
    (
        "s3://", "s3:///a", "s3://-bucket/a", "s3://buc ket", "s3://bucket//a", "s3://bucket/../a", "s3://bucket/./a",
        "s3://bucket/a?versionId=1", "s3://bucket?x=1", "s3://bucket/a#b", "s3://bucket/ä", "s3://bucket/a b",
        "s3://bucket/a\n", "s3://bucket/" + "x" * 600,
    ),
)  # fmt: skip
def test_what_is_no_folder_in_a_bucket(url: str) -> None:
    with pytest.raises(InvalidError, match="expected"):
        address_of(url)


@pytest.mark.parametrize("user", ("user:hunter2", ":hunter2", "hunter2"))
def test_a_password_is_refused_and_not_repeated(user: str) -> None:
    with pytest.raises(InvalidError, match="password") as raised:
        address_of(f"s3://{user}@bucket/a")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("url", ("s3://bucket?sig=hunter2", "s3://bucket/a?sig=hunter2", "s3://b:hunter2@c@d/a"))
def test_a_query_is_not_repeated(url: str) -> None:
    with pytest.raises(InvalidError) as raised:
        address_of(url)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    (
        {"endpoint": "localhost:9000"},
        {"endpoint": "http://user:hunter2@localhost"},
        {"endpoint": "https://host/?sig=hunter2"},
        {"proxy": "http://user:hunter2@localhost"},
        {"region": ""},
        {"profile": "a\nb"},
        {"anonymous": 1},
        {"single_writer": "yes"},
    ),
)
def test_bad_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidError, match=next(iter(changes))) as raised:
        ObjectSettings(**changes)  # type: ignore[arg-type]
    assert "hunter2" not in str(raised.value)
