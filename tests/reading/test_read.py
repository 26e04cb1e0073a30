"""read: the whole state of a checkpoint in new memory, without a state to fill."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import CorruptError, InvalidError, MissingError


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def require_equal(found: object, expected: object) -> None:
    """Require equal types, nesting and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys()
        for key, value in expected.items():
            require_equal(found[key], value)
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    else:
        assert found == expected


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """A checkpoint and its state."""
    model, optimizer = trained()
    state = {
        "model": model,
        "optimizer": optimizer,
        "ema": {"layer.weight": torch.randn(3, 2).to(torch.bfloat16), "decay": 0.5},
        "list": [torch.arange(4), {"deep": (torch.tensor(2.5), "text")}],
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "epoch": 7,
        "rng": holdfast.RngState(),
    }
    path = tmp_path / "checkpoint"
    holdfast.save(path, state, process_group=False)
    return path, state


def test_the_state_comes_back_as_torch_load_returns_it(saved: tuple[Path, dict[str, object]]) -> None:
    path, state = saved
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    content = holdfast.read(path)
    assert set(content) == {*state} - {"rng"}
    read_model = content["model"]
    assert isinstance(read_model, dict)
    require_equal(read_model, dict(model.state_dict()))
    other = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    other.load_state_dict(read_model)
    read_optimizer = content["optimizer"]
    assert isinstance(read_optimizer, dict)
    assert read_optimizer["param_groups"][0]["lr"] == 0.25
    names = [name for name, _ in model.named_parameters()]
    moments = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert read_optimizer["state"].keys() == set(names)
    require_equal(read_optimizer["state"], moments)
    for name in ("ema", "list", "dtype", "size", "epoch"):
        require_equal(content[name], state[name])
    assert type(content["size"]) is torch.Size


def test_numpy_needs_no_torch(saved: tuple[Path, dict[str, object]]) -> None:
    path, _ = saved
    code = (
        "import sys, holdfast; s = holdfast.read(sys.argv[1], framework='numpy'); assert 'torch' not in sys.modules; "
        "print(s['ema']['layer.weight'].dtype, s['model']['0.weight'].shape, s['dtype'], s['size'], s['list'][1])"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("uint16 (6, 4) bfloat16 (2, 3) {'deep': (array(2.5, dtype=float32), 'text')}")
    assert "left out" in ended.stderr and "rng" in ended.stderr


def test_tied_names_share_one_tensor(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 3), "two": torch.nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    holdfast.save(tmp_path / "c", {"model": model}, process_group=False)
    content = holdfast.read(tmp_path / "c")["model"]
    assert isinstance(content, dict)
    assert content["one.weight"].data_ptr() == content["two.weight"].data_ptr()
    assert torch.equal(content["two.weight"], model["one"].weight)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("epoch", {"epoch"}),
        ("model", {"model"}),
        (["model.0", "epoch"], {"model", "epoch"}),
        ("*.weight", {"model", "ema", "optimizer"}),
        ("optimizer.state.*.exp_avg", {"optimizer"}),
        ("list.1.deep", {"list"}),
    ],
)
def test_only_reads_what_matches(saved: tuple[Path, dict[str, object]], only: object, names: set[str]) -> None:
    path, _ = saved
    assert set(holdfast.read(path, only=only)) == names  # type: ignore[arg-type]


def test_only_leaves_out_what_does_not_match(saved: tuple[Path, dict[str, object]]) -> None:
    path, _ = saved
    assert set(holdfast.read(path, only="model.0")["model"]) == {"0.weight", "0.bias"}  # type: ignore[call-overload]
    state = holdfast.read(path, only="optimizer.state.*.exp_avg")["optimizer"]
    assert isinstance(state, dict) and set(state) == {"state"}
    assert all(set(each) == {"exp_avg"} for each in state["state"].values())


def test_only_reads_only_what_it_needs(saved: tuple[Path, dict[str, object]]) -> None:
    path, _ = saved
    for pack in path.rglob("*.safetensors"):
        pack.write_bytes(pack.read_bytes()[:-1])
    assert holdfast.read(path, only="epoch") == {"epoch": 7}
    with pytest.raises(CorruptError):
        holdfast.read(path)


def test_wrong_calls_are_refused(saved: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    path, _ = saved
    with pytest.raises(InvalidError, match=r"'modle\.\*'.*matches no name.*inspect"):
        holdfast.read(path, only=["modle.*", "epoch"])
    with pytest.raises(InvalidError, match="expected 'numpy' or 'torch'"):
        holdfast.read(path, framework="jax")
    with pytest.raises(InvalidError, match="selects nothing"):
        holdfast.read(path, only=[])
    with pytest.raises(MissingError):
        holdfast.read(tmp_path / "nowhere")


def test_a_torch_save_file_is_read_without_a_pickle(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({"model": model.state_dict(), "args": {"lr": 0.1}}, tmp_path / "old.pt")  # noqa: TID251
    content = holdfast.read(tmp_path / "old.pt")
    model_state = model.state_dict()
    flat = dict(_tensors(content))
    assert {name.removeprefix("model.") for name in flat} == set(model_state)
    for name, tensor in model_state.items():
        assert torch.equal(flat[f"model.{name}"], tensor)


def _tensors(value: object, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else ()
    return [pair for key, item in items for pair in _tensors(item, f"{path}.{key}" if path else str(key))]


def test_empty_tensors_and_ordered_dicts(tmp_path: Path) -> None:
    state = {"o": OrderedDict(b=torch.zeros(0, 3), a=np.float32(2.0)), "none": None}
    holdfast.save(tmp_path / "c", state, process_group=False)
    content = holdfast.read(tmp_path / "c")
    assert set(content["o"]) == {"a", "b"} and content["o"]["b"].shape == (0, 3) and content["none"] is None  # type: ignore[index, call-overload]
