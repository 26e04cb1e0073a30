"""Checkpoints exported as one file of torch.save: loaded by torch itself, and by Holdfast, to the last bit."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import holdfast
from holdfast import api
from holdfast.backends.foreign.file_layout import FileLayout, TensorLeaf
from holdfast.backends.foreign.torch.archive_reader import read_torch_file
from holdfast.backends.foreign.torch.archive_writer import put_archive
from holdfast.backends.foreign.torch.writer import TorchWriter
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.export import ExportContent, ExportOptions
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError
from tests.export.sources import bits, export_by, noise, saved_by_ranks, small_model, trained_state
from tests.export.written import alike, every_kind, loaded, mapped, same

EVERYTHING = ExportOptions(model_only=False)


def test_every_dtype_and_shape_is_exported_bit_for_bit(tmp_path: Path) -> None:
    state = every_kind()
    holdfast.save(tmp_path / "saved", {"model": dict(state)}, process_group=False)
    report = export_by(TorchWriter(), tmp_path / "saved", tmp_path / "out.pt")
    assert (tmp_path / "out.pt").stat().st_size == report.bytes
    same(loaded(tmp_path / "out.pt"), state)
    again: Any = api.open_checkpoint(tmp_path / "out.pt")
    same({name: again.read(f"model.{name}", framework="torch") for name in state}, state)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_several_ranks_hold_in_columns_and_flat_runs_is_put_together(tmp_path: Path, ranks: int) -> None:
    whole = {"columns": noise((53, 301), torch.float32, 1), "flat": noise((41, 97), torch.bfloat16, 2)}
    whole["flat_deep"] = noise((7, 11, 13, 5), torch.complex128, 3)
    source = saved_by_ranks(tmp_path / "run", whole, ranks)
    export_by(TorchWriter(), source, tmp_path / "out.pt")
    same(loaded(tmp_path / "out.pt"), whole)


def test_a_model_loads_its_file_and_ties_share_their_memory(tmp_path: Path) -> None:
    model = small_model()
    holdfast.save(tmp_path / "saved", {"model": model}, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch")
    found = loaded(tmp_path / "out.pt")
    same(found, model.state_dict())
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()
    other = small_model()
    torch.nn.init.zeros_(other[0].weight)
    other.load_state_dict(found)
    same(other.state_dict(), model.state_dict())
    assert api.open_checkpoint(tmp_path / "out.pt").manifest.aliases == {"model.2.weight": "model.0.weight"}


def test_floating_tensors_of_the_model_are_cast_and_no_others(tmp_path: Path) -> None:
    state = trained_state()
    holdfast.save(tmp_path / "saved", state, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch", dtype="bfloat16", model_only=False)
    found = loaded(tmp_path / "out.pt")
    model: Any = state["model"]
    same(found["model"], {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    assert found["optimizer"]["state"]["0.weight"]["exp_avg"].dtype == torch.float32


def test_an_optimizer_is_what_torchs_own_helpers_return_and_take(tmp_path: Path) -> None:
    state: Any = trained_state()
    holdfast.save(tmp_path / "saved", state, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch", model_only=False)
    found = loaded(tmp_path / "out.pt")
    expected: Any = get_optimizer_state_dict(state["model"], state["optimizer"])
    assert found["note"] == "plain"
    assert set(found["optimizer"]) == {"state", "param_groups"}
    assert found["optimizer"]["param_groups"] == expected["param_groups"]
    assert found["optimizer"]["state"].keys() == expected["state"].keys()
    for name, each in expected["state"].items():
        same(found["optimizer"]["state"][name], each)
    fresh: Any = trained_state()
    for each in fresh["optimizer"].state.values():
        each["exp_avg"].zero_()
    set_optimizer_state_dict(fresh["model"], fresh["optimizer"], found["optimizer"])
    alike(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_what_is_exported_is_loaded_by_holdfast_again(tmp_path: Path) -> None:
    state: Any = trained_state()
    holdfast.save(tmp_path / "saved", state, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch", model_only=False)
    fresh: Any = trained_state()
    for each in (*fresh["model"].parameters(), *[s["exp_avg"] for s in fresh["optimizer"].state.values()]):
        torch.nn.init.zeros_(each)
    fresh["note"] = ""
    report = holdfast.load(tmp_path / "out.pt", fresh, process_group=False)
    assert report.missing == report.unexpected == ()
    same(fresh["model"].state_dict(), state["model"].state_dict())
    alike(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_values_and_loose_tensors_stand_where_they_stood(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25), momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    kept = {
        "nested": {"deep.er": {"x": torch.arange(3)}, "list": [1, torch.ones(2), {"y": torch.zeros(1)}]},
        "counts": {1: "int key", (2, "b"): None},
        "text": "ü",
        "bytes": b"\0\xff",
        "pair": (1.5, complex(1, -2), True),
        "set": {1, 2},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda:1"),
        "large": 1 << 70,
    }
    holdfast.save(tmp_path / "saved", {"schedule": schedule, "model": model, **kept}, process_group=False)
    export_by(TorchWriter(), tmp_path / "saved", tmp_path / "out.pt", options=EVERYTHING)
    found = loaded(tmp_path / "out.pt")
    assert found.pop("schedule") == schedule.state_dict()
    same(found.pop("model"), model.state_dict())
    assert set(found) == set(kept)
    for key, each in kept.items():
        if key == "nested":
            assert bits(found[key]["deep.er"]["x"]) == bits(torch.arange(3))
            alike(found[key]["list"], each["list"])  # type: ignore[index]
        else:
            alike(found[key], each)


class Scaled(torch.nn.Linear):
    """A layer with extra state."""

    def get_extra_state(self) -> Any:
        return {"scale": 2.5, "steps": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


@pytest.mark.parametrize("model_only", [True, False])
def test_extra_state_stands_in_the_models_state_dict(tmp_path: Path, model_only: bool) -> None:
    model = torch.nn.Sequential(Scaled(2, 3), torch.nn.Linear(3, 1))
    holdfast.save(tmp_path / "saved", {"net": model}, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch", model_only=model_only)
    found = loaded(tmp_path / "out.pt")
    found = found if model_only else found["net"]
    alike(found, dict(model.state_dict()))
    model.load_state_dict(found)
    assert model[0].loaded == {"scale": 2.5, "steps": (1, 2)}


def test_several_modules_keep_their_keys(tmp_path: Path) -> None:
    state = {"actor": Scaled(2, 3), "critic": torch.nn.Linear(3, 1)}
    holdfast.save(tmp_path / "saved", dict(state), process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch")
    expected = {f"{key}.{name}": each for key, module in state.items() for name, each in module.state_dict().items()}
    alike(loaded(tmp_path / "out.pt"), expected)


def test_a_hyperparameter_that_is_a_tensor_is_one(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    holdfast.save(tmp_path / "saved", {"model": model, "optimizer": optimizer}, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch", model_only=False)
    (group,) = loaded(tmp_path / "out.pt")["optimizer"]["param_groups"]
    assert bits(group["lr"]) == bits(torch.tensor(0.25))


def test_a_torch_file_becomes_the_same_again(tmp_path: Path) -> None:
    state: Any = trained_state()
    saved = {"model": dict(state["model"].state_dict()), "optimizer": state["optimizer"].state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "first.pt")  # noqa: TID251 - the source
    api.export(tmp_path / "first.pt", tmp_path / "second.pt", to="torch", model_only=False)
    alike(loaded(tmp_path / "second.pt"), saved)


def test_what_each_rank_keeps_of_its_own_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"model": {"w": torch.ones(2)}, "rng": holdfast.RngState()}
    holdfast.save(tmp_path / "saved", state, process_group=False)
    with caplog.at_level(logging.WARNING, "holdfast"):
        api.export(tmp_path / "saved", tmp_path / "out.pt", to="torch", model_only=False)
    assert "rng" not in loaded(tmp_path / "out.pt")
    assert "rng" in caplog.text


def test_two_of_one_name_are_refused() -> None:
    tree = Group("dict", {"model": Group("dict", {"w": 1})})
    content = ExportContent({"model.w": TensorSpec("model.w", "int8", (1,))}, {}, tree)
    with pytest.raises(InvalidError, match=r"model\.w"):
        TorchWriter().files(content, EVERYTHING)


def test_what_torch_cannot_keep_is_refused_by_name() -> None:
    content = ExportContent({}, {}, Group("dict", {"note": {"x": slice(1)}}))
    with pytest.raises(InvalidError, match=r"slice"):
        TorchWriter().files(content, EVERYTHING)


@pytest.mark.parametrize("large_first", [True, False])
def test_a_file_beyond_four_gigabytes_is_found_its_way_in(tmp_path: Path, large_first: bool) -> None:
    """Its tensors are holes in a file, but for the last bytes of each."""
    leaves = [TensorLeaf("large", "int8", (5 << 30,)), TensorLeaf("small", "int16", (3,))]
    state = {
        leaf.fqn: leaf for leaf in (leaves if large_first else [*reversed(leaves), TensorLeaf("last", "int8", (5,))])
    }
    layout = FileLayout()
    put_archive(layout, state)
    file = layout.file("")
    path = tmp_path / "large.pt"
    with open(path, "wb") as out:
        out.truncate(file.bytes)
        for at, data in file.literals:
            os.pwrite(out.fileno(), data, at)
        for each in file.tensors:
            os.pwrite(out.fileno(), b"\1\2", each.offset + each.bytes - 2)
    for calculated in (False, True):
        found = mapped(path, calculated)
        assert found["large"].shape == (5 << 30,)
        assert found["large"][-2:].tolist() == [1, 2]
        assert found["small"].tolist() == [0, 0, 0x0201]
    ours: Any = read_torch_file(ForeignFiles(tmp_path), "large.pt")
    assert {name: ours[name].offset for name in ours} == {each.fqn: each.offset for each in file.tensors}
