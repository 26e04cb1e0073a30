"""Bad input, as real servers refuse it. Run by name: `pytest tests/campaign/refused_by_servers.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

import holdfast
from holdfast._face import offline_api
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.errors import CheckpointError, InvalidError, UnavailableError
from holdfast.settings import ObjectSettings, Settings
from tests.servers.all import only_variables_of
from tests.servers.azurite import AzuriteServer, azurite
from tests.servers.ceph import CephServer, ceph
from tests.servers.process import free_port
from tests.servers.server import BUCKET, Server

DAEMON_POOL: dict[str, Callable[[ObjectStore], object]] = {
    "size": lambda store: store.size("key"),
    "get": lambda store: store.get("key", 10),
    "read_into": lambda store: store.read_into("key", [(0, 1)], [memoryview(bytearray(1))]),
    "list": lambda store: list(store.list()),
    "folders": lambda store: store.folders(),
    "put": lambda store: store.put("key", b"1"),
    "put_if_absent": lambda store: store.put_if_absent("key", b"1"),
    "move": lambda store: store.move("key", "other"),
    "delete": lambda store: store.delete(["key", "other"]),
}


@pytest.fixture(scope="module")
def running_ceph() -> Iterator[CephServer]:
    with ceph() as server:
        yield server


@pytest.fixture(scope="module")
def running_azurite() -> Iterator[AzuriteServer]:
    with azurite() as server:
        yield server


@pytest.fixture
def server(running_ceph: CephServer, monkeypatch: pytest.MonkeyPatch) -> CephServer:
    only_variables_of(running_ceph, monkeypatch)
    return running_ceph


@pytest.fixture
def azure(running_azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> AzuriteServer:
    for name, value in running_azurite.variables.items():
        monkeypatch.setenv(name, value)
    return running_azurite


def require_refused(store: ObjectStore, what: str, secrets: tuple[str, ...], but: tuple[str, ...] = ()) -> None:
    """Require that each call but some is refused for good, says what to do, and shows no secret."""
    for name, call in DAEMON_POOL.items():
        if name in but:
            continue
        with pytest.raises(InvalidError, match=what) as raised:
            call(store)
        shown = "".join(traceback.format_exception(raised.value))
        assert not any(secret in shown for secret in secrets), name


def test_no_bucket(server: CephServer, azure: AzuriteServer) -> None:
    store = ObjectStore("s3://no-such-bucket-here/run", settings=server.settings())
    require_refused(store, "create the bucket", server.secrets)
    # A deletion of several says of each one that it is not there, and so it is.
    store = ObjectStore("az://no-such-bucket-here/run", settings=azure.settings())
    require_refused(store, "create the container", azure.secrets, but=("delete",))


def test_wrong_credentials(server: CephServer, azure: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("d3Jvbmd3cm9uZ3dyb25nd3Jvbmc=", "UNKNOWNUNKNOWNUNKNOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong[0])
    require_refused(ObjectStore(server.new_url(), settings=server.settings()), "secret key", wrong)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", wrong[1])
    require_refused(ObjectStore(server.new_url(), settings=server.settings()), "does not know", wrong)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong[0])
    require_refused(ObjectStore(azure.new_url(), settings=azure.settings()), "account and key", wrong)
    for each in (server, azure):
        store = ObjectStore(each.new_url(), settings=each.settings(anonymous=True))
        with pytest.raises(InvalidError):
            store.size("key")


def test_rights_to_read_alone(server: CephServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load works, and says that its report is not stored. What would change something is refused by name."""
    url, state = server.new_url(), {"weights": torch.arange(1000.0)}
    with _manager(server, url) as manager:
        manager.save(1, state).wait()
    server.new_user("reader", "CANARYREADERACCESSKE", "canary-reader-secret")
    actions = ["s3:GetObject", "s3:ListBucket"]
    _allow(server, "reader", actions)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CANARYREADERACCESSKE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-reader-secret")
    before = server.keys(url)
    for reports in (False, True):
        found = {"weights": torch.zeros(1000)}
        with _manager(server, url, reports=reports) as manager:
            assert manager.load(found) == 1
        assert torch.equal(found["weights"], state["weights"])
    settings = server.settings()
    assert list(holdfast.open_checkpoint(url, step=1, settings=settings).verify()) == []
    for change in (
        lambda: _save(server, url, 2),
        lambda: offline_api.remove_steps(url, [1], grace_seconds=0, settings=settings),
        lambda: offline_api.collect(url, settings=settings),
        lambda: holdfast.save(f"{url}/other", state, settings=settings, process_group=False),
    ):
        with pytest.raises(InvalidError, match=r"AccessDenied.*read, write, list and delete"):
            change()
    assert server.keys(url) == before


def test_a_clock_that_is_wrong(server: CephServer) -> None:
    code = "import sys; from tests.campaign.refused_by_servers import print_refusals; print_refusals(sys.argv[1])"
    for skew in ("-2h", "+2h"):
        command = ["faketime", "-f", skew, sys.executable, "-c", code, server.new_url()]
        done = subprocess.run(command, env=os.environ | server.environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert len(said) == len(DAEMON_POOL)
        assert all("InvalidError" in line and "clock of this machine" in line for line in said), said


def print_refusals(url: str) -> None:
    """Print how each call is refused, in a process of its own."""
    store = ObjectStore(url, settings=Settings())
    for call in DAEMON_POOL.values():
        try:
            call(store)
        except CheckpointError as error:
            print(type(error).__name__, error)
        else:
            print("not refused")


def test_a_bucket_that_keeps_versions(server: CephServer, caplog: pytest.LogCaptureFixture) -> None:
    """Ceph takes both creates there, so it is refused. With one writer it works, and says what a deletion leaves."""
    client = server.client()
    client.create_bucket(Bucket="versions")
    client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    with pytest.raises(InvalidError, match="single_writer=True"):
        _save(server, "s3://versions/run", 1)
    _require_versions_stay(server, "versions", caplog)


def test_a_bucket_with_a_lock(server: CephServer, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that is locked goes away, and `rm` and `gc` do not fail: they leave what the lock keeps."""
    client = server.client()
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    retention = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket="locked", ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": retention}
    )
    _require_versions_stay(server, "locked", caplog)
    (manifest,) = client.list_object_versions(Bucket="locked", Prefix="run/step-000000000001/manifest.json")["Versions"]
    with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
        client.delete_object(Bucket="locked", Key=manifest["Key"], VersionId=manifest["VersionId"])


def _require_versions_stay(server: CephServer, bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    url = f"s3://{bucket}/run"
    _save(server, url, 1, 2, single_writer=True)
    settings = server.settings(single_writer=True, collect_grace_seconds=0)
    offline_api.remove_steps(url, [1], grace_seconds=0, settings=settings)
    offline_api.collect(url, settings=settings)
    assert f"s3://{bucket} keeps versions" in caplog.text
    assert "does not name the newest step" in caplog.text  # Ceph replaces nothing there.
    assert list(holdfast.open_checkpoint(url, step=2, settings=settings).verify()) == []
    found = server.client().list_object_versions(Bucket=bucket, Prefix="run/step-000000000001/")
    assert {each["Key"] for each in found["Versions"]} <= {each["Key"] for each in found["DeleteMarkers"]}


def test_an_own_authority(server: CephServer) -> None:
    secure = server.over_tls()
    _save(secure, secure.new_url(), 1)
    store = ObjectStore(secure.new_url(), settings=secure.settings(ca_file=None))
    with pytest.raises(CheckpointError, match=r"AWS_CA_BUNDLE.*ca_file"):
        store.put("key", b"1")
    # Each port speaks one protocol.
    for endpoint in (server.endpoint.replace("http:", "https:"), secure.endpoint.replace("https:", "http:")):
        store = ObjectStore(secure.new_url(), settings=secure.settings(endpoint=endpoint))
        with pytest.raises(CheckpointError):
            store.put("key", b"1")


def test_an_endpoint_that_is_mistyped(server: CephServer, caplog: pytest.LogCaptureFixture) -> None:
    settings = server.settings(endpoint=f"http://127.0.0.1:{free_port()}", retry_seconds_per_call=1.0)
    with pytest.raises(UnavailableError, match="Connection refused"):
        holdfast.save(server.new_url(), {"step": 1}, settings=settings, process_group=False)
    assert "storage has not answered this process yet" in caplog.text


def test_a_gateway_that_restarts_is_waited_for(server: CephServer) -> None:
    url = server.new_url()
    with _manager(server, url) as manager:
        manager.save(1, {"weights": torch.arange(1000.0)}).wait()
        server.kill("rgw")
        restarting = threading.Timer(1.0, server.restart, ("rgw",))
        restarting.start()
        manager.save(2, {"weights": torch.arange(1000.0)}).wait()
        restarting.join()
    assert list(holdfast.open_checkpoint(url, step=2, settings=server.settings()).verify()) == []


def test_a_name_longer_than_the_store_takes(server: CephServer, azure: AzuriteServer) -> None:
    for each in (server, azure):
        store = ObjectStore(f"{each.root_url}/{'x' * 500}", settings=each.settings())
        longest = "/".join(["y" * 104] * 5)[: 1024 - len(store.address.prefix)].rstrip("/")
        store.put(longest, b"1")
        assert store.get(longest, 1) == b"1"
        with pytest.raises(InvalidError, match="1024"):
            store.put(f"{longest}y", b"1")


def _manager(server: Server, url: str, **changes: object) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(url, settings=server.settings(**changes), process_group=False, preemption=False)


def _save(server: Server, url: str, *steps: int, **changes: object) -> None:
    with _manager(server, url, **changes) as manager:
        for step in steps:
            manager.save(step, {"weights": torch.arange(1000.0), "step": step}).wait()


def _allow(server: CephServer, user: str, actions: list[str]) -> None:
    resources = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": [f"arn:aws:iam:::user/{user}"]},
        "Action": actions,
        "Resource": resources,
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    server.client().put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))


def test_a_setting_of_another_vendor(azure: AzuriteServer) -> None:
    settings = Settings(object_store=ObjectSettings(endpoint=azure.endpoint, kms_key="key"))
    with pytest.raises(InvalidError, match="s3:// only"):
        ObjectStore(azure.new_url(), settings=settings).size("key")
