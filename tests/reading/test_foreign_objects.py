"""Other systems' checkpoints as objects of a store in memory: listed once, read by ranges, changed meanwhile."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

import holdfast
from holdfast import CheckpointManager, api
from holdfast._face import wiring
from holdfast.backends.stores import foreign_objects
from holdfast.backends.stores.foreign_objects import ForeignObjects
from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.ports.readable import Buffers, ByteRanges, OnRange
from holdfast.base.types.diff import Verdict
from holdfast.base.types.events import Progress
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from tests.export.sources import bits, noise
from tests.export.written import dcp_saved

INDEX = "model.safetensors.index.json"


def weights(count: int = 4) -> dict[str, torch.Tensor]:
    return {f"layer{number}.weight": noise((40, 50), torch.bfloat16, number) for number in range(count)}


def stored(files: Mapping[str, bytes]) -> str:
    """Return the URL of a folder of these objects."""
    name = uuid.uuid4().hex
    store = MemoryStore(name).with_any_names()
    for key, data in files.items():
        store.put(key, data)
    return f"memory://{name}"


def copied(folder: Path) -> str:
    return stored({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})


def store_of(url: str) -> MemoryStore:
    return MemoryStore(url.removeprefix("memory://")).with_any_names()


def sharded(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, bytes]:
    """Return the files of a model as Hugging Face writes it, in several parts."""
    names = sorted(tensors)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    places = {name: files[number % count] for number, name in enumerate(names)}
    parts = {
        file: save({name: tensors[name] for name in names if places[name] == file}, metadata={"format": "pt"})
        for file in files
    }
    return {**parts, INDEX: json.dumps({"metadata": {}, "weight_map": places}).encode()}


def require_weights(url: str, tensors: Mapping[str, torch.Tensor]) -> None:
    checkpoint = api.open_checkpoint(url)
    assert set(checkpoint.tensors) == {f"model.{name}" for name in tensors}
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    holdfast.load(url, state, process_group=False)
    for name, tensor in tensors.items():
        assert bits(state["model"][name]) == bits(tensor)
        assert bits(checkpoint.read(f"model.{name}", framework="torch")) == bits(tensor)  # type: ignore[arg-type]
    assert list(checkpoint.verify()) == []


def test_a_model_in_one_file_and_in_many() -> None:
    require_weights(stored({"model.safetensors": save(weights()), "config.json": b"{}"}), weights())
    require_weights(stored(sharded(weights(20), 17)), weights(20))


def test_an_adapter() -> None:
    tensors = {"base_model.model.q.lora_A.weight": noise((8, 64), torch.float32, 1)}
    require_weights(stored({"adapter_model.safetensors": save(tensors), "adapter_config.json": b"{}"}), tensors)


def test_a_folder_of_dcp_and_its_values(tmp_path: Path) -> None:
    dcp_saved(tmp_path / "dcp", {"model": weights(), "step": 7, "args": {"lr": 0.5}})
    url = copied(tmp_path / "dcp")
    require_weights(url, weights())
    checkpoint = api.open_checkpoint(url)
    assert (checkpoint.step, checkpoint.objects["args"]) == (7, {"lr": 0.5})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    dcp_saved(tmp_path / "dcp", {"model": weights()})
    (tmp_path / "dcp" / ".metadata").unlink()
    with pytest.raises(MissingError, match=r"no \.metadata, which a save writes last"):
        api.open_checkpoint(copied(tmp_path / "dcp"))
    files = sharded(weights(), 2)
    del files["model-00002-of-00002.safetensors"]
    with pytest.raises(MissingError, match=r"model-00002-of-00002\.safetensors: no such object"):
        api.open_checkpoint(stored(files))
    with pytest.raises(MissingError, match="nothing is there"):
        api.open_checkpoint(stored({}))


def test_a_checkpoint_of_holdfast_comes_first() -> None:
    url = stored({"model.safetensors": save(weights(1))})
    holdfast.save(url, {"w": torch.ones(3)}, process_group=False)
    assert list(api.open_checkpoint(url).tensors) == ["w"]


@pytest.mark.parametrize(
    "lie",
    [
        lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
    ],
)
def test_a_lying_header_is_refused(lie: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CorruptError, match=r"memory://.*/model\.safetensors"):
        api.open_checkpoint(stored({"model.safetensors": lie(save(weights()))}))


class Rewrites:
    """Replaces an object once bytes of it were read."""

    def __init__(self, url: str, key: str, data: bytes | None) -> None:
        self._url, self._key, self._data = url, key, data

    def on_event(self, event: Progress) -> None:
        store = store_of(self._url)
        if self._data is None:
            store.delete([self._key])
        else:
            store.put(self._key, self._data)


@pytest.mark.parametrize(
    ("key", "data", "error"),
    [
        ("model-00002-of-00002.safetensors", sharded(weights(), 2)["model-00002-of-00002.safetensors"], ConflictError),
        (INDEX, b'{"weight_map": {}}', ConflictError),
        ("model-00001-of-00002.safetensors", None, (MissingError, CorruptError)),
    ],
)
def test_what_changes_while_it_is_copied_is_not_imported(
    key: str, data: bytes | None, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    url, run = stored(sharded(weights(), 2)), f"memory://{uuid.uuid4().hex}"
    with pytest.raises(error, match=key):
        api.import_checkpoint(url, run, step=3, copy=True, observer=Rewrites(url, key, data))
    assert not any(record.committed for record in api.list_steps(run).steps)


class Replacing(MemoryStore):
    """Replaces all objects of a folder once some bytes of a tensor were read."""

    files: Mapping[str, bytes] = {}

    def read_into(self, key: str, ranges: ByteRanges, buffers: Buffers, on_range: OnRange | None = None) -> None:
        super().read_into(key, ranges, buffers, on_range)
        if sum(stop - start for start, stop in ranges) >= weights()["layer0.weight"].nbytes:
            for each, data in self.files.items():
                self.put(each, data)


def test_a_load_of_files_that_are_replaced_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of a model have the same names and offsets, so a mix of both would look like either."""
    url = stored(sharded(weights(), 2))
    newer = {name: tensor + 1 for name, tensor in weights().items()}
    monkeypatch.setattr(wiring, "MemoryStore", Replacing)
    monkeypatch.setattr(Replacing, "files", sharded(newer, 2))
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights().items()}}
    with pytest.raises(ConflictError, match=r"was replaced while it was read"):
        holdfast.load(url, state, process_group=False)
    monkeypatch.setattr(Replacing, "files", {})
    holdfast.load(url, state, process_group=False)
    assert all(bits(state["model"][name]) == bits(tensor) for name, tensor in newer.items())


def test_an_import_from_a_url_and_back_to_disk(tmp_path: Path) -> None:
    url, run = stored(sharded(weights(), 2)), f"memory://{uuid.uuid4().hex}"
    assert api.import_checkpoint(url, run, step=3, copy=True).copied
    step = api.open_checkpoint(run, step=3)
    assert bits(step.read("model.layer1.weight", framework="torch")) == bits(weights()["layer1.weight"])  # type: ignore[arg-type]
    api.import_checkpoint(url, tmp_path / "run", step=4, copy=True)
    assert list(api.open_checkpoint(tmp_path / "run", step=4).verify()) == []
    found = api.diff(url, tmp_path / "run" / "step-000000000004")
    assert not found.only_a and not found.only_b
    assert {tensor.verdict for tensor in found.tensors} == {Verdict.EQUAL}


def test_a_step_refers_to_files_of_disks_only(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    for source, run in ((tmp_path, "s3://bucket/run"), ("s3://bucket/model", tmp_path / "run")):
        with pytest.raises(InvalidError, match=r"Copy the bytes: --copy, copy=True"):
            api.import_checkpoint(source, run, step=1)


def test_tensors_of_any_size_are_copied_whole(tmp_path: Path) -> None:
    """Pieces far apart, next to each other and longer than one request are read ahead of the copy, each once."""
    sizes = [1, 3, 1000, 300_000, 5 << 20, 7, 2 << 20]
    tensors = {f"t{number}": noise((size,), torch.uint8, number) for number, size in enumerate(sizes)}
    run = f"memory://{uuid.uuid4().hex}"
    api.import_checkpoint(stored({"model.safetensors": save(tensors)}), run, step=1, copy=True)
    step = api.open_checkpoint(run, step=1)
    for name, tensor in tensors.items():
        assert np.array_equal(step.read(f"model.{name}"), tensor.numpy())


def test_a_folder_of_too_many_objects_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_objects, "OBJECTS_MAX", 3)
    files = ForeignObjects(store_of(stored(dict.fromkeys("abc", b""))))
    assert [entry.key for entry in files.list()] == ["a", "b", "c"]
    with pytest.raises(InvalidError, match="over 3 objects; expected one checkpoint"):
        ForeignObjects(store_of(stored(dict.fromkeys("abcd", b"")))).list()


def test_a_run_of_many_objects_is_named_as_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"memory://{uuid.uuid4().hex}"
    with CheckpointManager(run, process_group=False) as manager:
        manager.save(1, {"w": torch.ones(3)})
    monkeypatch.setattr(foreign_objects, "OBJECTS_MAX", 3)
    with pytest.raises(InvalidError, match="is the root of a run"):
        api.open_checkpoint(run)
