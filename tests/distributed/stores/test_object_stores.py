"""Object stores with several processes: ranks that save and load, writers that race, writers that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._face import offline_api
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.errors import ConflictError
from holdfast.settings import ObjectSettings, Settings
from tests.distributed.stores.object_cases import TRAINED
from tests.distributed.stores.object_worker import RACERS
from tests.support.gloo_worlds import Case, run_world
from tests.support.object_proxy import CUT, LOST, Asked, object_proxy
from tests.support.object_server import ACCESS_KEY, BUCKET, SECRET_KEY, ObjectServer

ROUNDS = 20
KILLS = 12


def work(name: str, *arguments: object, variables: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.stores.object_worker", name, *map(str, arguments)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_two_ranks_train(objects: ObjectServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = objects.new_url()
    arguments = {"url": url, "variables": objects.environment}
    results = run_world(2, [Case("tests.distributed.stores.object_cases:trains", arguments)], tmp_path)
    for value in results.values("trains"):
        assert value == TRAINED
    keys = objects.keys(f"{url}/run")
    assert objects.client().get_object(Bucket=BUCKET, Key=_name(url, "run/latest"))["Body"].read() == (
        b"step-000000000003"
    )
    # Unchanged tensors are stored once, as on disks.
    packs = [key for key in keys if key.endswith(".safetensors")]
    sizes = {each.key: each.bytes for each in ObjectStore(f"{url}/run", settings=objects.settings()).list()}
    assert sum(sizes[key] for key in packs) < 2 * 4 * 50_000
    settings = objects.settings()
    offline_api.remove_steps(f"{url}/run", [2], grace_seconds=0, settings=settings)
    assert not any(key.startswith("step-000000000002/") for key in objects.keys(f"{url}/run"))
    assert list(holdfast.open_checkpoint(f"{url}/run", step=3, settings=settings).verify()) == []
    offline_api.export(f"{url}/run", tmp_path / "model", to="safetensors", step=3, workers=2, settings=settings)
    (exported,) = (tmp_path / "model").glob("*.safetensors")
    assert exported.stat().st_size > 4 * 50_000
    _require_no_secret(objects, url, results.logs(), *capfd.readouterr())


@pytest.mark.long
def test_one_of_eight_writers_wins(objects: ObjectServer, tmp_path: Path) -> None:
    url = objects.new_url()
    said = work("race", url, ROUNDS, tmp_path / "outcomes", variables=objects.environment)
    outcomes = [json.loads((tmp_path / f"outcomes.{number}").read_text()) for number in range(RACERS)]
    for turn in range(ROUNDS):
        came = [each[turn] for each in outcomes]
        assert sorted(came) == ["ConflictError"] * (RACERS - 1) + ["won"], f"round {turn}: {came}"
        checkpoint = holdfast.open_checkpoint(f"{url}/{turn}", settings=objects.settings())
        assert set(checkpoint.read("winner").tolist()) == {came.index("won")}
    _require_no_secret(objects, url, said)


def test_a_writer_whose_files_the_winner_removed_has_lost(objects: ObjectServer) -> None:
    url, won = objects.new_url(), objects.new_url()
    holdfast.save(won, {"weights": torch.zeros(10)}, settings=objects.settings(), process_group=False)
    client = objects.client()

    def win(asked: Asked) -> None:
        """Do what another process does that publishes first: before the parts are read, its manifest is there."""
        if asked.method == "GET" and "/parts/" in asked.path and "manifest.json" not in objects.keys(url):
            for key in objects.keys(url):
                client.delete_object(Bucket=BUCKET, Key=_name(url, key))
            for key in objects.keys(won):
                client.put_object(Bucket=BUCKET, Key=_name(url, key), Body=_body(objects, f"{won}/{key}"))

    with object_proxy(objects.endpoint) as proxy:
        proxy.rule = win
        settings = Settings(object_store=ObjectSettings(endpoint=proxy.endpoint))
        with pytest.raises(ConflictError, match="published first"):
            holdfast.save(url, {"weights": torch.ones(10)}, settings=settings, process_group=False)
    checkpoint = holdfast.open_checkpoint(url, settings=objects.settings())
    assert not checkpoint.read("weights").any()


@pytest.mark.long
def test_a_killed_writer_leaves_nothing_behind(objects: ObjectServer, tmp_path: Path) -> None:
    """Killed at its n-th change of step 2, before or after the server got the request."""
    seen: dict[int, int] = {}

    def kill(asked: Asked) -> str | None:
        found = re.search(r"/(\d+)/step-000000000002/", asked.path)
        if found is None or asked.method not in ("PUT", "POST"):
            return None
        pid = int(found[1])
        number = list(seen).index(pid) if pid in seen else len(seen)
        seen[pid] = seen.get(pid, 0) + 1
        if seen[pid] != number // 2 + 1:
            return None
        os.kill(pid, signal.SIGKILL)
        return LOST if number % 2 else CUT

    url = objects.new_url()
    with object_proxy(objects.endpoint) as proxy:
        proxy.rule = kill
        variables = objects.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
        work("killed", url, KILLS, tmp_path / "ends", variables=variables)
    ends = json.loads((tmp_path / "ends").read_text())
    assert sum(status == -signal.SIGKILL for _, status in ends) >= KILLS // 2, ends
    settings = Settings(object_store=ObjectSettings(endpoint=objects.endpoint), collect_grace_seconds=0)
    for pid, _ in ends:
        root = f"{url}/{pid}"
        offline_api.collect(root, settings=settings)
        for step in (1, 2):
            folder = f"step-{step:012d}/"
            keys = [key.removeprefix(folder) for key in objects.keys(root) if key.startswith(folder)]
            if "manifest.json" not in keys:
                assert step == 2
                assert keys == []
                continue
            attempt = json.loads(_body(objects, f"{root}/{folder}manifest.json"))["attempt"]
            left = [key for key in keys if not key.startswith((f"{attempt}/", "manifest.json", "reports/"))]
            assert left == []
            checkpoint = holdfast.open_checkpoint(root, step=step, settings=settings)
            assert checkpoint.read("weights")[9_999] == 9_998 + step
    # Nothing is left that a listing does not show.
    prefix = url.partition(f"{BUCKET}/")[2]
    assert objects.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", []) == []


def _name(url: str, key: str) -> str:
    return f"{url}/{key}".removeprefix(f"s3://{BUCKET}/")


def _body(objects: ObjectServer, url: str) -> bytes:
    body: bytes = objects.client().get_object(Bucket=BUCKET, Key=url.removeprefix(f"s3://{BUCKET}/"))["Body"].read()
    return body


def _require_no_secret(objects: ObjectServer, url: str, *texts: str) -> None:
    """Require that no credential is in what was printed or stored."""
    stored = [_body(objects, f"{url}/{key}") for key in objects.keys(url)]
    assert stored
    for data in [*stored, *(text.encode() for text in texts)]:
        for secret in (ACCESS_KEY, SECRET_KEY, "canary"):
            assert secret.encode() not in data
