"""Other systems' checkpoints in a bucket of a real server: read by ranges, exported there, imported from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast import api
from holdfast.errors import ConflictError, InvalidError
from holdfast.settings import MIB, ObjectSettings, Settings
from tests.export.sources import bits, noise
from tests.export.written import dcp_loaded, dcp_saved, loaded
from tests.support.object_proxy import Asked, ObjectProxy, object_proxy
from tests.support.object_server import BUCKET, ObjectServer
from tests.unit.cli.running import holdfast as command

TENSORS = {f"layer{number}.weight": noise((300, 1000), torch.float32, number) for number in range(4)}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def proxy(objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectProxy]:
    with object_proxy(objects.endpoint) as proxy:
        # Commands find the server by it.
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def settings(proxy: ObjectProxy) -> Settings:
    return Settings(object_store=ObjectSettings(endpoint=proxy.endpoint))


def uploaded(objects: ObjectServer, folder: Path) -> str:
    """Upload a folder with boto3; return its URL."""
    url = objects.new_url()
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{url.removeprefix(f's3://{BUCKET}/')}/{path.relative_to(folder)}"
            objects.client().upload_file(str(path), BUCKET, key)
    return url


def downloaded(objects: ObjectServer, url: str, folder: Path) -> Path:
    """Download everything below a URL with boto3."""
    folder.mkdir()
    for key in objects.keys(url):
        objects.client().download_file(BUCKET, f"{url.removeprefix(f's3://{BUCKET}/')}/{key}", str(folder / key))
    return folder


def hugging_face(folder: Path) -> Path:
    """Write a model in two files with an index."""
    folder.mkdir()
    names = sorted(TENSORS)
    places = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: TENSORS[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def ranges_of(proxy: ObjectProxy, suffix: str) -> list[int]:
    """Return the bytes that each request for such a file asked for; fail if one asked for a whole file."""
    asked = [each for each in proxy.asked if each.method == "GET" and each.path.endswith(suffix)]
    bounds = [each.headers["range"].removeprefix("bytes=").split("-") for each in asked]
    return [int(last) - int(first) + 1 for first, last in bounds]


def require_same(checkpoint: api.Checkpoint) -> None:
    for name, tensor in TENSORS.items():
        assert bits(checkpoint.read(f"model.{name}", framework="torch")) == bits(tensor)  # type: ignore[arg-type]


def test_a_model_is_read_by_ranges(
    objects: ObjectServer, proxy: ObjectProxy, settings: Settings, tmp_path: Path
) -> None:
    url = uploaded(objects, hugging_face(tmp_path / "model"))
    checkpoint = holdfast.open_checkpoint(url, settings=settings)
    # The manifest that is not there, a listing, the index, and two ranges for each header.
    assert len(proxy.asked) == 7
    assert sum(ranges_of(proxy, ".safetensors")) < 1000
    proxy.asked.clear()
    checkpoint.read("model.layer1.weight", (slice(0, 3),))
    (read_bytes,) = ranges_of(proxy, ".safetensors")
    assert read_bytes <= MIB + 4096, "a chunk"
    require_same(checkpoint)
    one = holdfast.open_checkpoint(f"{url}/model-00001-of-00002.safetensors", settings=settings)
    assert set(one.tensors) == {"model.layer0.weight", "model.layer2.weight"}
    named = holdfast.open_checkpoint(f"{url}/{INDEX}", settings=settings)
    assert set(named.tensors) == set(checkpoint.tensors)


def test_a_state_is_filled_from_a_folder_of_dcp(
    objects: ObjectServer, proxy: ObjectProxy, settings: Settings, tmp_path: Path
) -> None:
    folder = dcp_saved(tmp_path / "dcp", {"model": TENSORS, "step": 7})
    url = uploaded(objects, folder)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}}
    holdfast.load(url, state, process_group=False, settings=settings)
    assert all(bits(state["model"][name]) == bits(tensor) for name, tensor in TENSORS.items())
    data_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
    assert data_bytes <= sum(ranges_of(proxy, ".distcp")) < 1.1 * data_bytes
    state = holdfast.read(url, settings=settings)
    assert state["step"] == 7 and bits(state["model"]["layer2.weight"]) == bits(TENSORS["layer2.weight"])
    found = command("diff", url, folder, "--json")
    assert (found.status, command("verify", url).status) == (0, 0), found.err
    assert command("inspect", url, "--json").json()["step"] == 7


def test_a_file_of_torch_is_read_by_ranges(
    objects: ObjectServer, proxy: ObjectProxy, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    torch.save({"model": TENSORS}, tmp_path / "torch" / "saved.pt")  # noqa: TID251 - it is another system's file
    url = uploaded(objects, tmp_path / "torch")
    checkpoint = holdfast.open_checkpoint(f"{url}/saved.pt", settings=settings)
    assert sum(ranges_of(proxy, ".pt")) < 300_000
    require_same(checkpoint)


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
def test_what_is_exported_is_read_by_the_other_system(
    objects: ObjectServer, proxy: ObjectProxy, settings: Settings, tmp_path: Path, to: str
) -> None:
    holdfast.save(tmp_path / "saved", {"model": TENSORS}, process_group=False)
    folder = objects.new_url()
    url = f"{folder}/saved.pt" if to == "torch" else folder
    ended = command("export", tmp_path / "saved", url, "--to", to, "--shard-size", "2500KB", "--json")
    assert ended.status == 0, ended.err
    puts = [each.path.rpartition("/")[2] for each in proxy.asked if each.method == "PUT" and "probe-" not in each.path]
    last = {"safetensors": INDEX, "dcp": ".metadata", "torch": "saved.pt"}[to]
    assert (*puts[:2], puts[-1], len(puts)) == ("plan.json", "begun", last, len(ended.json()["files"]) + 2)
    if to != "torch":
        assert len(proxy.asked) == 11 + len(ended.json()["files"])
    there = downloaded(objects, folder, tmp_path / "there")
    if to == "safetensors":
        parts = [load_file(path) for path in there.glob("*.safetensors")]
        found = {name: tensor for part in parts for name, tensor in part.items()}
        assert len(parts) == 2 and set(json.loads((there / INDEX).read_text())["weight_map"]) == set(TENSORS)
    elif to == "dcp":
        state = {"model": {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}}
        found = dcp_loaded(there, state)["model"]
    else:
        found = loaded(there / "saved.pt")
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in TENSORS.items()
    }
    require_same(holdfast.open_checkpoint(url, settings=settings))
    before = objects.keys(folder)
    with pytest.raises(ConflictError, match="exists already; it was not touched"):
        api.export(tmp_path / "saved", url, to=to, settings=settings)
    assert objects.keys(folder) == before


def test_an_export_that_was_refused_goes_on_with_several_processes(
    objects: ObjectServer, proxy: ObjectProxy, settings: Settings, tmp_path: Path
) -> None:
    holdfast.save(tmp_path / "saved", {"model": TENSORS}, process_group=False)

    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (403, "AccessDenied") if asked.method == "PUT" and asked.path.endswith(".metadata") else None

    proxy.rule = refuse
    url = objects.new_url()
    with pytest.raises(InvalidError, match="AccessDenied"):
        api.export(tmp_path / "saved", url, to="dcp", shard_bytes=MIB, settings=settings)
    assert ".metadata" not in objects.keys(url)
    proxy.rule = lambda _: None
    objects.client().delete_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}/__0_1.distcp")
    proxy.asked.clear()
    report = api.export(tmp_path / "saved", url, to="dcp", shard_bytes=MIB, workers=2, settings=settings)
    assert 0 < report.resumed_bytes < report.bytes
    stored = [each.path.rpartition("/")[2] for each in proxy.asked if each.method == "PUT"]
    assert stored == ["__0_1.distcp", ".metadata"]
    require_same(holdfast.open_checkpoint(url, settings=settings))


def test_a_checkpoint_is_imported_from_and_to_urls(
    objects: ObjectServer, proxy: ObjectProxy, settings: Settings, tmp_path: Path
) -> None:
    folder = hugging_face(tmp_path / "model")
    url, run = uploaded(objects, folder), objects.new_url()
    refused = command("import", url, run, "--step", 1)
    assert refused.status == 2 and "Copy the bytes: --copy" in refused.err
    assert objects.keys(run) == []
    for source, root, step in ((url, run, 1), (folder, run, 2), (url, tmp_path / "run", 3)):
        ended = command("import", source, root, "--step", step, "--copy")
        assert ended.status == 0, ended.err
        checkpoint = holdfast.open_checkpoint(root, step=step, settings=settings)
        require_same(checkpoint)
        assert checkpoint.origin == "safetensors" and list(checkpoint.verify()) == []
