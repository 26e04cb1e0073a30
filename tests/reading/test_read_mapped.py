"""read(mmap=True): tensors over private maps of the packs, each checked when it is first asked for."""

from __future__ import annotations

import copy
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast._face.checkpoint_manager import CheckpointManager
from holdfast.backends.stores.local import LocalStore
from holdfast.core.format.names import step_folder
from holdfast.errors import CorruptError, InvalidError
from holdfast.settings import Settings
from tests.reading.test_read import require_equal
from tests.unit.ranks import PATIENT, World, plain, sharded

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.int64)


def state() -> dict[str, object]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    return {
        "model": model,
        "large": torch.randn(2000, 300),
        "kinds": {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES},
        "empty": torch.empty(0, 4),
        "one": torch.tensor(2.5),
        "list": [torch.arange(4), {"deep": torch.ones(2), "text": "t"}],
        "step": 7,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "c", state(), process_group=False)
    return tmp_path / "c"


def part(content: object, *keys: str) -> object:
    """Return a value below some keys."""
    for key in keys:
        assert isinstance(content, Mapping)
        content = content[key]
    return content


def tensor(content: object, *keys: str) -> torch.Tensor:
    found = part(content, *keys)
    assert isinstance(found, torch.Tensor)
    return found


def as_dicts(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: as_dicts(item) for key, item in value.items()}
    return [as_dicts(item) for item in value] if isinstance(value, list) else value


def pack_of(path: Path) -> Path:
    (pack,) = path.rglob("*.safetensors")
    return pack


def damage(path: Path, fqn: str) -> int:
    """Flip a bit in the middle of a tensor; return where."""
    (piece,) = holdfast.open_checkpoint(path).pieces(fqn)
    at = piece.offset + piece.bytes // 2
    with pack_of(path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return at


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_it_holds_what_read_without_maps_returns(path: Path, framework: str) -> None:
    mapped = holdfast.read(path, mmap=True, framework=framework)
    whole = holdfast.read(path, framework=framework)
    assert list(mapped) == list(whole) and len(mapped) == len(whole) and "model" in mapped and "other" not in mapped
    found, expected = as_dicts(mapped), as_dicts(whole)
    if framework == "torch":
        require_equal(found, expected)
    else:
        assert str(found) == str(expected)
        bits = part(mapped, "kinds", "torch.bfloat16")
        assert isinstance(bits, np.ndarray) and bits.dtype == np.uint16


def test_a_model_loads_from_it(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
    loaded = part(holdfast.read(path, only="model.*", mmap=True), "model")
    assert isinstance(loaded, Mapping)
    model.load_state_dict(loaded, assign=True)
    original = state()["model"]
    assert isinstance(original, torch.nn.Module)
    require_equal(dict(model.state_dict()), dict(original.state_dict()))


def test_a_tensor_is_the_same_one_each_time_and_writes_never_reach_the_file(path: Path) -> None:
    before = pack_of(path).read_bytes()
    content = holdfast.read(path, mmap=True)
    tensor(content, "large").fill_(3.0)
    assert tensor(content, "large") is tensor(content, "large") and tensor(content, "large")[5, 5] == 3.0
    assert pack_of(path).read_bytes() == before
    assert not torch.equal(tensor(holdfast.read(path, mmap=True), "large"), tensor(content, "large"))
    found: list[torch.Tensor] = []
    fresh = holdfast.read(path, mmap=True)
    threads = [threading.Thread(target=lambda: found.append(tensor(fresh, "large"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_damage_is_found_where_it_is_first_asked_for(path: Path) -> None:
    at = damage(path, "large")
    content = holdfast.read(path, mmap=True)
    assert tensor(content, "model", "0.weight").shape == (300, 300)
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"large: .*r00000\.safetensors: bytes (\d+)–(\d+) hash to") as found:
            content["large"]
        first, stop = (int(text) for text in str(found.value).split("bytes ")[1].split(" ")[0].split("–"))
        assert first <= at < stop


def test_damage_in_a_list_leaves_the_rest(path: Path) -> None:
    damage(path, "list.0")
    content = holdfast.read(path, mmap=True)
    with pytest.raises(CorruptError, match=r"list\.0"):
        content["list"]
    assert content["step"] == 7 and tensor(content, "one") == 2.5


def test_a_file_that_is_short_or_missing_is_named(path: Path) -> None:
    mapped_before = holdfast.read(path, mmap=True)
    os.truncate(pack_of(path), 8192)
    for content in (holdfast.read(path, mmap=True), mapped_before):
        with pytest.raises(CorruptError, match=r"large: .*: bytes \d+–\d+: the file ends at 8192"):
            content["large"]
    os.unlink(pack_of(path))
    content = holdfast.read(path, mmap=True)
    with pytest.raises(CorruptError, match=r"large: .*r00000.safetensors: bytes \d+–\d+: the file is missing"):
        content["large"]
    assert content["step"] == 7


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_file_that_is_deleted_or_replaced_stays_readable(path: Path, change: str) -> None:
    expected = tensor(holdfast.read(path), "large")
    content = holdfast.read(path, mmap=True)
    seen = tensor(content, "model", "0.weight").clone()
    if change == "deleted":
        shutil.rmtree(path)
    else:
        other = path / "other"
        other.write_bytes(bytes(10))
        os.replace(other, pack_of(path))
    assert torch.equal(tensor(content, "large"), expected)
    assert torch.equal(tensor(content, "model", "0.weight"), seen)


def test_parts_of_several_ranks_are_put_together_in_memory(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, settings=Settings())
    world = World(2, settings=PATIENT, stores={0: store, 1: store})

    def save(rank: int, run: CheckpointManager) -> object:
        return run.save(1, {"w": sharded(2), "p": plain(3.0)}).wait(timeout=25.0)

    world.play(save)
    content = holdfast.read(tmp_path / step_folder(1).rstrip("/"), mmap=True)
    assert torch.equal(tensor(content, "w"), torch.arange(48.0).reshape(16, 3))
    assert torch.equal(tensor(content, "p"), torch.full((100,), 3.0))


def test_unchanged_tensors_of_earlier_steps_and_other_stores(tmp_path: Path) -> None:
    frozen = {"frozen": torch.arange(50_000.0), "step": 1}
    with CheckpointManager(tmp_path, process_group=False) as manager:
        for step in (1, 2):
            manager.save(step, {**frozen, "step": step}).wait()
    content = holdfast.read(tmp_path / step_folder(2).rstrip("/"), mmap=True)
    assert torch.equal(tensor(content, "frozen"), frozen["frozen"])  # type: ignore[arg-type]
    holdfast.save("memory://mapped", frozen, process_group=False)
    assert torch.equal(tensor(holdfast.read("memory://mapped", mmap=True), "frozen"), frozen["frozen"])  # type: ignore[arg-type]


def test_a_torch_save_file_is_mapped(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0), "list": [torch.ones(3)]}, tmp_path / "a.pt")  # noqa: TID251
    content = holdfast.read(tmp_path / "a.pt", mmap=True)
    tensor(content, "w")[0] = 9
    assert tensor(holdfast.read(tmp_path / "a.pt"), "w")[0] == 0
    assert torch.equal(tensor(content, "w")[1:], torch.arange(1.0, 1000.0))


def test_numpy_needs_no_torch(path: Path) -> None:
    code = """
import sys
sys.modules["torch"] = None
import holdfast
content = holdfast.read(sys.argv[1], framework="numpy", mmap=True)
print(content["large"].shape, content["large"].flags.writeable, content["large"].flags.owndata, content)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("(2000, 300) True False MappedState([")


def test_it_is_read_only_and_wrong_calls_are_refused_at_once(path: Path) -> None:
    content = holdfast.read(path, mmap=True)
    with pytest.raises(TypeError):
        content["step"] = 8  # type: ignore[index]
    with pytest.raises(KeyError):
        content["absent"]
    with pytest.raises(InvalidError, match="matches no name"):
        holdfast.read(path, only="absent", mmap=True)


def test_an_optimizer_loads_from_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    fresh = torch.optim.AdamW(torch.nn.Linear(30, 30).parameters())
    fresh.load_state_dict(holdfast.read(tmp_path / "c", mmap=True)["optimizer"])  # type: ignore[arg-type]
    require_equal(fresh.state_dict(), optimizer.state_dict())


def test_copies_are_plain_dicts_and_a_deep_copy_shares_no_memory(path: Path) -> None:
    content = holdfast.read(path, mmap=True)
    deep = copy.deepcopy(content)
    file = io.BytesIO()
    torch.save(content, file)  # noqa: TID251
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # noqa: TID251
    for each in (content.copy(), copy.copy(content), deep, loaded):  # type: ignore[attr-defined]
        assert type(each) is dict and type(each["kinds"]) is dict
        for key in ("model", "list", "one"):
            require_equal(each[key], as_dicts(content[key]))
    assert content.copy()["one"] is content["one"]  # type: ignore[attr-defined]
    tensor(deep, "kinds", "torch.float32").fill_(100.0)
    assert tensor(content, "kinds", "torch.float32").max() < 100.0
