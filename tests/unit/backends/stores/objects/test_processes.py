"""Object stores in processes of all kinds: forked ones, ones without the extra, ones without credentials."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.errors import InvalidError
from holdfast.settings import ObjectSettings, Settings
from tests.support.object_server import ObjectServer

_FORKS = """
import os, sys
from holdfast._face import wiring

store = wiring.store_at(sys.argv[1], wiring.DEFAULT_SETTINGS)
store.put("key", b"from the parent")

def grandchild():
    store.put("grandchild", store.get("child", 100))

def child():
    assert store.get("key", 100) == b"from the parent"
    store.put("child", b"from the child")
    in_child(grandchild)
    import obstore  # the copy is not what others import
    assert obstore._obstore.__file__ == first

def in_child(act):
    pid = os.fork()
    if not pid:
        act()
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0

import obstore
first = obstore._obstore.__file__
in_child(child)
assert store.get("grandchild", 100) == b"from the child"
assert store.get("key", 100) == b"from the parent"
"""


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | variables
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_forked_process_goes_on(objects: ObjectServer) -> None:
    done = python(_FORKS, objects.new_url(), **objects.environment)
    assert done.returncode == 0, done.stderr


_FORKS_AND_READS_ON_THREADS = """
import os, sys, threading
from holdfast.settings import Settings
from holdfast.backends.stores.objects.store import ObjectStore

store = ObjectStore(sys.argv[1], settings=Settings())
store.put("key", b"from the parent")
pid = os.fork()
if not pid:
    begin, got = threading.Barrier(8), []

    def read():
        begin.wait()
        got.append(store.get("key", 100))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0 if got == 8 * [b"from the parent"] else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_forked_process_begins_with_several_threads(objects: ObjectServer) -> None:
    done = python(_FORKS_AND_READS_ON_THREADS, objects.new_url(), **objects.environment)
    assert done.returncode == 0, done.stderr


def test_a_forked_process_does_not_wait_for_uploads_of_its_parent() -> None:
    code = """
import os
from holdfast.backends.stores.remote.memory import BytesInFlight
bound = BytesInFlight(100)
bound.take(100)
with bound._changed:
    pid = os.fork()
if not pid:
    bound.take(100)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""
    assert python(code).stdout == "0\n"


def test_the_missing_extra_is_named() -> None:
    code = """
import sys
sys.modules["obstore"] = None
from holdfast._face import wiring
from holdfast.errors import InvalidError
try:
    wiring.store_at("s3://bucket/run", wiring.DEFAULT_SETTINGS).get("key", 10)
except InvalidError as error:
    print(error)
"""
    done = python(code, AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y")
    assert "pip install 'holdfast[s3]'" in done.stdout, done


def test_disks_load_nothing_of_object_stores() -> None:
    code = """
import sys
from holdfast._face import wiring
wiring.store_at("/tmp", wiring.DEFAULT_SETTINGS)
print([name for name in ("obstore", "boto3", "holdfast.backends.stores.objects.store") if name in sys.modules])
"""
    assert python(code).stdout == "[]\n"


def test_no_credentials_and_no_such_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = ObjectStore("s3://bucket/run", settings=Settings())
    with pytest.raises(InvalidError, match="none were found"):
        store.get("key", 10)
    store = ObjectStore("s3://bucket/run", settings=Settings(object_store=ObjectSettings(profile="nobody")))
    with pytest.raises(InvalidError, match="profile 'nobody'"):
        store.get("key", 10)


def test_a_profile_is_used(objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, settings = objects.new_url(), objects.settings(profile="training")
    (tmp_path / "credentials").write_text("[training]\naws_access_key_id=AKIAPROFILE\naws_secret_access_key=secret\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = ObjectStore(url, settings=settings)
    store.put("key", b"1")
    assert store.get("key", 1) == b"1"
    assert "secret" not in repr(vars(store)) + repr(settings)


def test_certificates_that_cannot_be_read(objects: ObjectServer) -> None:
    store = ObjectStore(objects.new_url(), settings=objects.settings(ca_file="/no/such/file.pem"))
    with pytest.raises(InvalidError, match="ca_file"):
        store.get("key", 10)
