"""Checkpoints exported to safetensors: loaded by the stock library, and by Holdfast, to the last bit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import holdfast
from holdfast import api
from holdfast.base.types.export import ExportOptions
from holdfast.errors import InvalidError
from holdfast.settings import MIB
from tests.export.sources import SAFE_DTYPES, bits, exported, noise, saved_by_ranks, small_model, trained_state


def loaded(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """Return what the stock library finds in files whose names begin so; no name may be in two."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        each = safetensors.torch.load_file(path)
        assert not found.keys() & each.keys()
        found |= each
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {name: bits(each) for name, each in found.items()} == {name: bits(each) for name, each in expected.items()}


def test_every_dtype_and_shape_is_exported_bit_for_bit(tmp_path: Path) -> None:
    state = {str(dtype)[6:]: noise((37, 29), dtype, seed) for seed, dtype in enumerate(SAFE_DTYPES)}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), "byte": torch.tensor([7], dtype=torch.uint8)}
    holdfast.save(tmp_path / "saved", {"model": dict(state)}, process_group=False)
    report = exported(tmp_path / "saved", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors"] == list(report.files)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == report.bytes
    same(loaded(tmp_path / "out"), state)
    again = api.open_checkpoint(tmp_path / "out")
    same({name: again.read(f"model.{name}", framework="torch") for name in state}, state)  # type: ignore[misc]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_several_ranks_hold_in_columns_and_flat_runs_is_put_together(tmp_path: Path, ranks: int) -> None:
    whole = {
        "columns": noise((53, 301), torch.float32, 1),
        "flat": noise((41, 97), torch.bfloat16, 2),
        "flat_deep": noise((7, 11, 13, 5), torch.float64, 3),
        "narrow": noise((900, 4), torch.int8, 4),
    }
    source = saved_by_ranks(tmp_path / "run", whole, ranks)
    report = exported(source, tmp_path / "out")
    same(loaded(tmp_path / "out"), whole)
    assert report.read_bytes >= sum(each.nbytes for each in whole.values())


def test_shards_are_filled_in_turn_and_the_index_says_what_lies_where(tmp_path: Path) -> None:
    state = {f"layer{n}.weight": noise((64, 64), torch.float32, n) for n in range(7)}
    state["layer9.large"] = noise((100, 1000), torch.float32, 9)
    holdfast.save(tmp_path / "saved", {"model": dict(state)}, process_group=False)
    exported(tmp_path / "saved", tmp_path / "out", ExportOptions(shard_bytes=40_000))
    same(loaded(tmp_path / "out"), state)
    document = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert document["metadata"]["total_size"] == sum(each.nbytes for each in state.values())
    assert set(document["weight_map"]) == set(state)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    for name in names:
        held = safetensors.torch.load_file(tmp_path / "out" / name)
        assert {document["weight_map"][each] for each in held} == {name}
        assert sum(each.nbytes for each in held.values()) <= 40_000 or list(held) == ["layer9.large"]
    assert len(names) == 5  # two of 16 KiB in each of four, and the large one
    again = api.open_checkpoint(tmp_path / "out")
    same({name: again.read(f"model.{name}", framework="torch") for name in state}, state)  # type: ignore[misc]


@pytest.mark.parametrize("name", api.EXPORT_DTYPES)
def test_floating_tensors_are_cast_as_torch_casts_and_nothing_else(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    state = {
        "double": torch.randn(33, 47, dtype=torch.float64),
        "single": torch.cat([torch.randn(5000) * 1e3, torch.tensor([0.0, -0.0, 1e-30, 6e4, float("inf")])]),
        "ties": (torch.arange(1 << 16, dtype=torch.int32) * 0x8001).view(torch.float32).nan_to_num(1.0),
        "half": noise((4096,), torch.float16, 1).nan_to_num(2.0),
        "brain": noise((64, 64), torch.bfloat16, 2).nan_to_num(2.0),
        "small": noise((31,), torch.float8_e4m3fn, 3),
        "whole": noise((31,), torch.int64, 3),
        "complex": noise((31,), torch.complex64, 3),
        "scalar": torch.tensor(1.0009765),
    }
    holdfast.save(tmp_path / "saved", {"model": dict(state)}, process_group=False)
    exported(tmp_path / "saved", tmp_path / "out", ExportOptions(dtype=name))
    stay = {"small", "whole", "complex"}
    same(loaded(tmp_path / "out"), {key: each if key in stay else each.to(dtype) for key, each in state.items()})


def test_the_model_alone_or_everything_beside_it(tmp_path: Path) -> None:
    state = trained_state()
    model = state["model"]
    assert isinstance(model, torch.nn.Module)
    holdfast.save(tmp_path / "saved", state, process_group=False)
    whole = api.open_checkpoint(tmp_path / "saved")

    exported(tmp_path / "saved", tmp_path / "model")
    untied = {name: each for name, each in model.state_dict().items() if name != "2.weight"}
    same(loaded(tmp_path / "model"), untied)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "2.weight": "0.weight"}
    fresh = small_model()
    for parameter in fresh.parameters():
        parameter.data.zero_()
    assert safetensors.torch.load_model(fresh, tmp_path / "model" / "model.safetensors") == (set(), [])
    same(dict(fresh.state_dict()), dict(model.state_dict()))

    for shard_bytes in (1 << 40, 10_000):
        target = tmp_path / f"all-{shard_bytes}"
        exported(tmp_path / "saved", target, ExportOptions(model_only=False, shard_bytes=shard_bytes, dtype="float16"))
        same(loaded(target), {name: each.half() if each.is_floating_point() else each for name, each in untied.items()})
        rest = {name for name in whole.tensors if not name.startswith("model.")}
        same(
            loaded(target, "optimizer"),
            {name: whole.read(name, framework="torch") for name in rest},  # type: ignore[misc]
        )
        again = api.open_checkpoint(target)
        assert set(again.tensors) == set(whole.tensors)
        assert again.aliases == whole.aliases


def test_a_model_that_is_loaded_from_what_was_exported_is_the_same(tmp_path: Path) -> None:
    model = small_model()
    holdfast.save(tmp_path / "saved", {"model": model}, process_group=False)
    exported(tmp_path / "saved", tmp_path / "out", ExportOptions(shard_bytes=10_000))
    fresh = small_model()
    for tensor in (*fresh.parameters(), *fresh.buffers()):
        tensor.data.zero_()
    holdfast.load(tmp_path / "out", {"model": fresh}, process_group=False)
    same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_what_is_exported_can_be_exported_again_from_where_it_lies(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "saved", trained_state(), process_group=False)
    for number, shard_bytes in enumerate((7_000, 1 << 40, 30_000)):
        source = tmp_path / f"out{number - 1}" if number else tmp_path / "saved"
        exported(source, tmp_path / f"out{number}", ExportOptions(shard_bytes=shard_bytes, model_only=False))
    same(loaded(tmp_path / "out2"), loaded(tmp_path / "out0"))
    same(loaded(tmp_path / "out2", "optimizer"), loaded(tmp_path / "out0", "optimizer"))
    assert len(loaded(tmp_path / "out0", "optimizer")) > 3


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("net",), {"0.weight"}),
        (("generator", "critic"), {"generator.0.weight", "critic.0.weight"}),
        (("model", "critic"), {"0.weight"}),
    ],
)
def test_the_model_is_found_whatever_it_is_called(tmp_path: Path, keys: tuple[str, ...], expected: set[str]) -> None:
    state = {key: torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)) for key in keys}
    holdfast.save(tmp_path / "saved", {**state, "loose": torch.ones(3)}, process_group=False)
    exported(tmp_path / "saved", tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == expected


def test_a_state_of_nothing_but_tensors_is_the_model(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "saved", {"a": torch.ones(3), "b": {"c": torch.zeros(2)}}, process_group=False)
    exported(tmp_path / "saved", tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"a", "b.c"}


def test_two_processes_write_the_same_bytes_as_one(tmp_path: Path) -> None:
    state = {f"layer{n}": noise((3, 1 << 20), torch.float32, n) for n in range(8)}
    holdfast.save(tmp_path / "saved", {"model": state}, process_group=False)
    for workers in (1, 2):
        api.export(
            tmp_path / "saved",
            tmp_path / f"out{workers}",
            to="safetensors",
            shard_bytes=30_000_000,
            workers=workers,
            memory_bytes=64 * MIB * workers,
        )
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / f"out{n}").iterdir()} for n in (1, 2))
    assert one == two
    assert len(one) == 5


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.complex128), torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)],
    ids=["complex128", "pair"],
)
def test_what_safetensors_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path, tensor: torch.Tensor) -> None:
    holdfast.save(tmp_path / "saved", {"model": {"w": tensor}}, process_group=False)
    text = f"model.w: dtype {str(tensor.dtype)[6:]} of shape {list(tensor.shape)}; safetensors has no such type"
    with pytest.raises(InvalidError, match=re.escape(text)):
        exported(tmp_path / "saved", tmp_path / "out")
    assert os.listdir(tmp_path) == ["saved"]


def test_a_state_without_a_model_is_refused_unless_everything_is_asked_for(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "saved", trained_state(), only="optimizer*", process_group=False)
    with pytest.raises(InvalidError, match="the state has no model: its tensors are under optimizer"):
        exported(tmp_path / "saved", tmp_path / "out")
    exported(tmp_path / "saved", tmp_path / "out", ExportOptions(model_only=False))
    assert set(loaded(tmp_path / "out", "optimizer")) == set(api.open_checkpoint(tmp_path / "saved").tensors)
