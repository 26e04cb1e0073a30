"""Someone copies runs and checkpoints between disks and object stores, is interrupted, and works with the copies."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import api
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.clock import SystemClock
from holdfast.core.format.names import step_folder
from holdfast.errors import ConflictError, CorruptError
from holdfast.offline.copying.copy_run import RunCopy
from holdfast.offline.copying.destination import CopyDestination
from holdfast.settings import MIB, ObjectSettings, Settings
from tests.everyday.frozen_run import (
    FROZEN_BYTES,
    STEPS,
    require_resumes,
    require_step,
    state_at,
    step_at,
    step_path,
    used_bytes,
)
from tests.support.object_proxy import CUT, Asked, object_proxy
from tests.support.object_server import BUCKET, ObjectServer
from tests.unit.cli.running import command as separate_command
from tests.unit.cli.running import holdfast as command

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

HELD: dict[str, torch.Tensor] = {"weights": torch.arange(9.0 * MIB), "bias": torch.ones(5)}
"""A state of 36 MiB: one pack of a disk, in two parts."""


@pytest.fixture
def server(objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    """Return the server, which is found by the variables alone."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", objects.endpoint)
    return objects


def uploads(server: ObjectServer, url: str) -> list[str]:
    """Return the keys of uploads that nobody has ended, by boto3."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = server.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
    return [each["Key"].removeprefix(prefix) for each in found]


def test_a_run_goes_to_an_object_store_to_another_and_back(run: Path, server: ObjectServer, tmp_path: Path) -> None:
    api.tag(run, 2, "best")
    first, second, back = server.new_url(), server.new_url(), tmp_path / "back"
    for source, destination in ((run, first), (first, second), (second, back)):
        ended = command("cp", source, destination)
        assert (ended.status, ended.err) == (0, "") and ended.out.startswith("3 steps: copied ")
        assert api.list_steps(destination).run_id == api.list_steps(run).run_id
        assert [record.tags for record in api.list_steps(destination).steps] == [(), ("best",), ()]
        for step in STEPS:
            compared = command("diff", step_at(run, step), step_at(destination, step))
            assert compared.status == 0, compared.out
    keys = server.keys(second)
    assert keys == server.keys(first) and not [key for key in keys if key.endswith(".link") or "copying" in key]
    # Each pack once on an object store, and under its links on a disk.
    assert sum(key.endswith(".safetensors") for key in keys) == len(list(run.rglob("*.safetensors")))
    assert abs(used_bytes(back) - used_bytes(run)) < FROZEN_BYTES / 4
    assert [record.stands_alone for record in api.list_steps(back).steps] == [True] * 3
    require_resumes(second, 3)
    require_resumes(back, 3)


def test_one_checkpoint_goes_with_all_that_it_needs(run: Path, server: ObjectServer, tmp_path: Path) -> None:
    url, again = server.new_url(), server.new_url()
    document = command("cp", run, url, "--step", "3", "--json").json()
    assert (document["root"], document["steps"], document["damages"]) == (url, 1, [])
    require_step(url, 3)
    holdfast.save(f"{again}/saved", state_at(7), process_group=False)
    api.copy_checkpoint(f"{again}/saved", tmp_path / "saved")
    require_step(tmp_path / "saved", 7)
    api.copy_checkpoint(url, f"{again}/copy")
    assert [key for key in server.keys(f"{again}/copy") if "report" not in key] == [
        key for key in server.keys(url) if "report" not in key
    ]
    with pytest.raises(ConflictError, match="is not empty"):
        api.copy_checkpoint(url, tmp_path / "saved")


@pytest.mark.parametrize("is_remote", [False, True], ids=["disk", "s3"])
def test_damage_is_named_and_not_copied(run: Path, server: ObjectServer, tmp_path: Path, is_remote: bool) -> None:
    source: Path | str = run
    (pack,) = step_path(run, 3).glob("*/r00000.safetensors")
    key = pack.relative_to(run).as_posix()
    if is_remote:
        source = server.new_url()
        api.copy_run(run, source)
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    if is_remote:
        server.client().put_object(Bucket=BUCKET, Key=f"{source}/{key}".removeprefix(f"s3://{BUCKET}/"), Body=data)
    else:
        pack.write_bytes(data)
    destination = server.new_url()
    ended = command("cp", source, destination)
    assert ended.status == 1
    assert re.search(rf"damaged steps \[3\]: .*{key} bytes \[\d+, {len(data)}\) of head: chunk hashes to", ended.err)
    assert not [each for each in server.keys(destination) if each.startswith(key) or "003/manifest" in each]
    assert "holdfast.json" not in server.keys(destination)
    document = command("cp", source, destination, "--skip-damaged", "--json").json()
    assert (document["steps"], document["files"], document["left_out"]) == (2, 0, [3])
    assert [(each["tensor"], each["stop"]) for each in document["damages"]] == [("head", len(data))]
    for step in (1, 2):
        require_step(step_at(destination, step), step)


def test_a_bit_that_flips_on_the_way_once_is_no_damage(run: Path, server: ObjectServer, tmp_path: Path) -> None:
    class Flipping(LocalStore):
        flips = 1

        def read_into(self, key, ranges, buffers, on_range=None):  # type: ignore[no-untyped-def]
            super().read_into(key, ranges, buffers, on_range)
            if key.endswith(".safetensors") and self.flips:
                self.flips -= 1
                buffers[0][-1] ^= 1

        def mapped(self, key):  # type: ignore[no-untyped-def]
            memory = super().mapped(key)
            if key.endswith(".safetensors") and self.flips:
                self.flips -= 1
                memory[-1] ^= 1  # Of this process alone.
            return memory

    destination = ObjectStore(server.new_url(), settings=server.settings())
    source = Flipping(run, settings=Settings())
    assert RunCopy(source, destination, SystemClock()).run().steps == 3
    assert source.flips == 0
    for step in STEPS:
        require_step(step_at(destination.url, step), step)


def _forked(source: Path, url: str, endpoint: str, object_bytes_max: int) -> None:
    settings = Settings(object_store=ObjectSettings(endpoint=endpoint))
    store = ObjectStore(url, settings=settings)
    store.traits = replace(store.traits, object_bytes_max=object_bytes_max)
    RunCopy(LocalStore(source, settings=settings), RetryingStore(store, settings), SystemClock()).run()


@dataclass
class Ends:
    """A rule of a proxy: a signal at the n-th request of a kind."""

    method: str
    part: str
    how: signal.Signals
    left: int
    pid: Future[int] = field(default_factory=Future)
    """Of the process that makes the requests: known a moment after its start."""
    sent: list[str] = field(default_factory=list)

    def rule(self, asked: Asked) -> str | None:
        if asked.method == self.method and self.part in asked.path:
            self.sent.append(asked.path)
            self.left -= 1
            if self.left == 0:
                os.kill(self.pid.result(60), self.how)
                return CUT
        return None

    def in_child(self, source: Path, url: str, endpoint: str, object_bytes_max: int = 256 * MIB) -> int | None:
        """Copy in a process that was forked; return its exit status."""
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_forked, args=(source, url, endpoint, object_bytes_max))
        child.start()
        assert child.pid is not None
        self.pid.set_result(child.pid)
        child.join(120)
        return child.exitcode


@pytest.mark.long
def test_a_copy_that_is_killed_or_interrupted_goes_on(
    run: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.new_url()
    with object_proxy(server.endpoint) as proxy:
        # The claim, the probe, and a few files of nine.
        ends = Ends("PUT", "", signal.SIGKILL, 6)
        proxy.rule = ends.rule
        assert ends.in_child(run, url, proxy.endpoint) == -signal.SIGKILL
        there = set(server.keys(url))
        ends = Ends("PUT", "", signal.SIGINT, 1)
        proxy.rule = ends.rule
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        process = subprocess.Popen(separate_command("cp", run, url), stderr=subprocess.PIPE)
        ends.pid.set_result(process.pid)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130 and b"Run the same command again: it goes on" in err
        assert command("cp", run, url).status == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    sent = {path.partition(url.rpartition("/")[2])[2].lstrip("/") for path in ends.sent}
    files = {key for key in sent if key.endswith((".safetensors", ".msgpack"))}
    assert files and not files & there, "what was there is not sent again"
    for step in STEPS:
        require_step(step_at(url, step), step)
    assert uploads(server, url) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_large_object_leaves_no_parts_behind(server: ObjectServer, tmp_path: Path, how: signal.Signals) -> None:
    run, url = tmp_path / "run", server.new_url()
    with holdfast.CheckpointManager(run, process_group=False) as manager:
        manager.save(1, dict(HELD)).wait()
    ends = Ends("PUT", "partNumber=2", how, 1)
    with object_proxy(server.endpoint) as proxy:
        proxy.rule = ends.rule
        assert ends.in_child(run, url, proxy.endpoint, 5 * MIB) != 0 and ends.left <= 0
        begun = uploads(server, url)
        assert (len(begun) == 1 and begun[0].endswith(".safetensors")) == (how == signal.SIGKILL)
    _forked(run, url, server.endpoint, 5 * MIB)
    assert uploads(server, url) == []
    loaded = {name: torch.zeros_like(tensor) for name, tensor in HELD.items()}
    holdfast.load(step_at(url, 1), loaded, process_group=False)
    assert all(torch.equal(loaded[name], HELD[name]) for name in HELD)


def test_uploads_of_other_programs_go_on(server: ObjectServer) -> None:
    """A destination may be the root of a bucket, where others send meanwhile."""
    url, attempt = server.new_url(), "0123456789abcdef"
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    ours = [f"{step_folder(1)}{attempt}/r00000.safetensors", f"{attempt}/r00000-1.safetensors", "quarantine/pack"]
    others = ["data/shard-00", "other-run/step-000000000001/0123456789abcdef/r00000.safetensors"]
    for key in (*ours, *others):
        server.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    store = ObjectStore(url, settings=server.settings())
    CopyDestination(store, SystemClock()).claim("a run", None)
    assert uploads(server, url) == others


def test_gc_removes_uploads_that_nobody_ended(run: Path, server: ObjectServer) -> None:
    url = server.new_url()
    api.copy_run(run, url)
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    attempt = next(key for key in server.keys(url) if key.endswith(".safetensors")).rpartition("/")[0]
    for key in (f"{attempt}/r00009.safetensors", "notes/of-mine"):
        server.client().create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    assert command("gc", url, "--dry-run", "--json").json()["removed"]["uploads"] == 1
    assert command("gc", url, "--grace", "0").out.endswith("; 1 unfinished upload\n")
    assert uploads(server, url) == ["notes/of-mine"]


def test_the_other_verbs_on_an_object_store(run: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.new_url()
    api.copy_run(run, url)
    client, prefix = server.client(), url.removeprefix(f"s3://{BUCKET}/")
    assert command("tag", url, "3", "best").status == 0 and command("tag", url, "2", "best", "--move").status == 0
    assert command("diff", step_at(url, 1), step_at(url, 3)).status == 1
    # A bit of a manifest and a whole index are lost, and rebuilt from what the ranks wrote.
    key = f"{prefix}/{step_folder(3)}manifest.json"
    data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 4
    client.put_object(Bucket=BUCKET, Key=key, Body=data)
    index = next(each for each in server.keys(url) if each.startswith(step_folder(2)) and "index-" in each)
    client.delete_object(Bucket=BUCKET, Key=f"{prefix}/{index}")
    assert command("repair", url, "--dry-run").status == 0
    report = command("repair", url, "--json").json()
    assert [(step["step"], step["outcome"]) for step in report["steps"]] == [(2, "repaired"), (3, "repaired")]
    assert any(each.startswith("quarantine/") for each in server.keys(url))
    for step in STEPS:
        require_step(step_at(url, step), step)
    assert command("rm", url, "1", "--grace", "0").status == 0
    for step in (2, 3):
        require_step(step_at(url, step), step)
    assert [record.step for record in api.list_steps(url).steps if record.committed] == [2, 3]


def test_one_writer_is_promised_on_the_command_line(
    run: Path, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lies(asked: Asked) -> None:
        asked.headers.pop("if-none-match", None)

    with object_proxy(objects.endpoint) as proxy:
        proxy.rule = lies
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        url = objects.new_url()
        refused = command("cp", run, url)
        assert refused.status == 2 and "let two writers create one object" in refused.err
        assert objects.keys(url) == []
        assert command("cp", run, url, "--single-writer").status == 0
        assert command("tag", url, "3", "best", "--single-writer").status == 0
    settings = Settings(object_store=ObjectSettings(endpoint=objects.endpoint))
    assert list(holdfast.open_checkpoint(url, step="best", settings=settings).verify()) == []


def test_memory_for_objects_on_their_way_is_bounded(run: Path, server: ObjectServer) -> None:
    """With memory for one object at a time the copy still ends."""
    settings = Settings(object_store=ObjectSettings(bytes_in_flight_max=MIB))
    store = RetryingStore(ObjectStore(server.new_url(), settings=settings), settings)
    assert RunCopy(LocalStore(run, settings=settings), store, SystemClock()).run().steps == 3


def test_a_file_that_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    (index,) = step_path(run, 2).glob("*/index-00000.msgpack")
    index.unlink()
    with pytest.raises(CorruptError, match=r"damaged steps \[2\]: .*index-00000.msgpack"):
        api.copy_run(run, tmp_path / "copy")
    assert api.copy_run(run, tmp_path / "copy", skip_damaged=True).left_out == (2,)
    for step in (1, 3):
        require_step(step_at(tmp_path / "copy", step), step)
    # What is repaired in the source is copied.
    with pytest.raises(CorruptError):
        api.copy_run(run, tmp_path / "whole")
    api.repair(run)
    assert api.copy_run(run, tmp_path / "whole").steps == 3


def test_an_unfinished_copy_passes_for_no_run(run: Path, tmp_path: Path) -> None:
    """Its newest step is missing. A job that went on there would train from an older one, and nobody would know."""
    (pack,) = step_path(run, 3).glob("*/r00000.safetensors")
    pack.write_bytes(pack.read_bytes()[:-1])
    copy = tmp_path / "copy"
    assert command("cp", run, copy).status == 1
    with holdfast.CheckpointManager(copy, process_group=False) as manager:
        manager.load(state_at(0))
        with pytest.raises(
            ConflictError, match="holds an unfinished copy of a run, so its newest steps may be missing"
        ):
            manager.save(4, state_at(4)).wait()
    assert not (copy / "holdfast.json").exists()
    assert command("cp", run, copy, "--skip-damaged").status == 0
    require_resumes(copy, 2)


def test_what_cannot_be_copied_is_refused(run: Path, tmp_path: Path) -> None:
    save_file({"model": torch.ones(3)}, tmp_path / "model.safetensors")
    for foreign in (tmp_path, tmp_path / "model.safetensors"):
        refused = command("cp", foreign, tmp_path.with_name("copy"))
        assert refused.status == 2 and "another system wrote it" in refused.err
    refused = command("cp", tmp_path / "typo", tmp_path / "copy")
    assert refused.status == 2 and "no checkpoint at" in refused.err
    refused = command("cp", run, tmp_path / "copy", "--step", "2", "--skip-damaged")
    assert refused.status == 2 and "--skip-damaged leaves steps of a run out" in refused.err
    assert not (tmp_path / "copy").exists()
