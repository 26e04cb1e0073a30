"""The shipped store suite, and a run, on every server. Run by name: `pytest tests/campaign/on_servers.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import holdfast
from holdfast._face import offline_api
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.ports.store import Store
from holdfast.errors import ConflictError, InvalidError
from holdfast.testing.store import StoreSuite
from tests.distributed.stores.object_cases import TRAINED
from tests.servers.all import EXCLUSIVE, SERVERS, only_variables_of
from tests.servers.rclone import rclone
from tests.servers.server import Server
from tests.support.gloo_worlds import Case, run_world
from tests.support.object_proxy import object_proxy


@pytest.fixture(scope="module", params=EXCLUSIVE)
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    only_variables_of(running, monkeypatch)
    return running


class TestOnServer(StoreSuite):
    """Every test has a folder of its own."""

    is_asked_for_cached: ClassVar[bool] = False

    @pytest.fixture
    def store(self, server: Server) -> Store:
        settings = server.settings()
        return RetryingStore(ObjectStore(server.new_url(), settings=settings), settings)


def test_two_ranks_train(server: Server, tmp_path: Path) -> None:
    url = server.new_url()
    arguments = {"url": url, "variables": server.environment}
    results = run_world(2, [Case("tests.distributed.stores.object_cases:trains", arguments)], tmp_path)
    for value in results.values("trains"):
        assert value == TRAINED
    assert server.read(f"{url}/run/latest") == b"step-000000000003"
    _require_no_secret(server, url, results.logs())
    settings = server.settings(collect_grace_seconds=0)
    offline_api.remove_steps(f"{url}/run", [2], grace_seconds=0, settings=settings)
    offline_api.collect(f"{url}/run", settings=settings)
    keys = server.keys(f"{url}/run")
    assert not any(key.startswith("step-000000000002/") for key in keys)
    assert not any("probe-" in key for key in keys)
    assert list(holdfast.open_checkpoint(f"{url}/run", step=3, settings=settings).verify()) == []
    offline_api.export(f"{url}/run", tmp_path / "model", to="safetensors", step=3, workers=2, settings=settings)
    (exported,) = (tmp_path / "model").glob("*.safetensors")
    assert exported.stat().st_size > 4 * 50_000
    assert server.unfinished_uploads() == []


def test_a_step_has_one_writer(server: Server) -> None:
    url = server.new_url()
    for number in range(2):
        state = {"weights": torch.full((1000,), float(number))}
        if number:
            with pytest.raises(ConflictError):
                holdfast.save(url, state, settings=server.settings(), process_group=False)
        else:
            holdfast.save(url, state, settings=server.settings(), process_group=False)
    assert not holdfast.open_checkpoint(url, settings=server.settings()).read("weights").any()


def test_a_deletion_keeps_its_condition_where_the_server_does(server: Server) -> None:
    """Azure does. Ceph 16 deletes anyway, and Google compares by a header that the client signs not."""
    keeps = {"azurite": True}.get(server.name, False)
    if server.settings().object_store.ca_file is not None:
        return  # The proxy speaks plain HTTP to the server.
    with object_proxy(server.settings().object_store.endpoint.removesuffix("/canaryaccount")) as proxy:  # type: ignore[union-attr]
        path = "/canaryaccount" if server.name == "azurite" else ""
        store = ObjectStore(server.new_url(), settings=server.settings(endpoint=f"{proxy.endpoint}{path}"))
        for key in ("one", "two"):
            store.put(key, b"1")
            proxy.asked.clear()
            store.move(key, "aside")
        deletions = [asked for asked in proxy.asked if asked.method in ("DELETE", "POST") and "probe" not in asked.path]
    assert [("if-match" in asked.headers) for asked in deletions] == [keeps]
    assert server.keys(store.url) == ["aside"]


def _require_no_secret(server: Server, url: str, *texts: str) -> None:
    stored = [server.read(f"{url}/{key}") for key in server.keys(url)]
    assert stored
    for data in [*stored, *(text.encode() for text in texts)]:
        for secret in (*server.secrets, "canary"):
            assert secret.encode() not in data.lower() if secret == "canary" else secret.encode() not in data


def test_rclone_takes_every_create_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with rclone() as server:
        only_variables_of(server, monkeypatch)
        url, state = server.new_url(), {"weights": torch.arange(100_000.0)}
        with pytest.raises(InvalidError, match="single_writer=True"):
            holdfast.save(url, state, settings=server.settings(), process_group=False)
        assert server.keys(url) == []
        alone = server.settings(single_writer=True)
        with holdfast.CheckpointManager(f"{url}/run", settings=alone, process_group=False, preemption=False) as manager:
            for step in (1, 2, 3):
                manager.save(step, {**state, "step": step}).wait()
            found = {"weights": torch.zeros(100_000), "step": 0}
            assert manager.load(found) == found["step"] == 3
            assert torch.equal(found["weights"], state["weights"])
        holdfast.save(f"{url}/best", state, settings=alone, process_group=False)
        holdfast.save(f"{url}/best", {"weights": torch.ones(10)}, settings=alone, process_group=False, overwrite=True)
        assert holdfast.open_checkpoint(f"{url}/best", settings=alone).read("weights").all()
        offline_api.remove_steps(f"{url}/run", [1], grace_seconds=0, settings=alone)
        assert list(holdfast.open_checkpoint(f"{url}/run", step=3, settings=alone).verify()) == []
