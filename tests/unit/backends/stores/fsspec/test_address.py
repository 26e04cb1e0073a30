"""URLs of file systems: what they name, what is refused, and that no refusal repeats a secret."""

from __future__ import annotations

import pytest

from holdfast._face import wiring
from holdfast.backends.stores.fsspec.address import file_system_address
from holdfast.errors import InvalidError
from holdfast.settings import Settings
from tests.unit.backends.stores.objects.test_processes import python


@pytest.mark.parametrize(
    ("url", "kept"),
    (
        ("sftp://host/runs/7/", "sftp://host/runs/7"),
        ("sftp://me@host:2222/runs", "sftp://me@host:2222/runs"),
        ("hdfs:///user/me", "hdfs:///user/me"),
        ("hdfs://nn-1.example:8020/user/me", "hdfs://nn-1.example:8020/user/me"),
        ("hf://org/repo@main/run", "hf://org/repo@main/run"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("local:///tmp/über uns/run-7", "local:///tmp/über uns/run-7"),
    ),
)
def test_a_folder(url: str, kept: str) -> None:
    assert file_system_address(url).url == kept


@pytest.mark.parametrize(
    ("url", "text"),
    (
        ("sftp://me:canary@host/x", "has a password"),
        ("sftp://me:can/ary@host/x", "expected sftp://HOST"),
        ("http://canary@host/x", "has a user"),
        ("hf://canary@x/y", "has a user"),
        ("sftp://host/x?key=canary", "expected folders"),
        ("sftp://host/x#canary", "expected folders"),
        ("sftp://host?canary/x", "HOST:PORT"),
        ("sftp://host/a//b", "neither empty"),
        ("sftp://host/a/../b", "neither empty"),
        ("sftp://host/a/*/b", "expected folders"),
        ("sftp://ho st/a", "HOST:PORT"),
        ("local://tmp/x", "local:///FOLDER"),
        ("local://", "local:///FOLDER"),
        ("nothing-known://x", r"is not supported.*fsspec does not know"),
        ("simplecache::sftp://x", "is not supported"),
        ("s3a://bucket/x", "expected s3://"),
        ("gcs://bucket/x", "expected gs://"),
        ("abfs://container/x", "expected az://"),
    ),
)
def test_no_folder(url: str, text: str) -> None:
    with pytest.raises(InvalidError, match=text) as caught:
        wiring.store_at(url, Settings())
    assert "canary" not in str(caught.value)


def test_the_folder_above() -> None:
    settings = Settings()
    above = wiring.parent_of(wiring.store_at("local:///a/b", settings), settings)
    assert above is not None and (above[0].url, above[1]) == ("local:///a", "b")
    for top in ("local:///a", "http://host", "memory://a"):
        assert wiring.parent_of(wiring.store_at(top, settings), settings) is None


def test_memory_without_a_name_is_no_file_system() -> None:
    with pytest.raises(InvalidError, match="memory://NAME"):
        wiring.store_at("memory://", Settings())


_ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import holdfast
try:
    holdfast.open_checkpoint(sys.argv[1]).read()
except holdfast.InvalidError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("url", "absent", "command"),
    (
        ("sftp://host/x", "fsspec", "pip install 'holdfast[fsspec]'"),
        ("sftp://host/x", "paramiko", "pip install 'holdfast[fsspec]' paramiko"),
    ),
)
def test_a_missing_package_is_named_with_its_command(url: str, absent: str, command: str) -> None:
    done = python(_ABSENT, url, absent)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
