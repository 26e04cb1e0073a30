"""Checkpoints exported as folders of DCP: loaded by `torch.distributed.checkpoint` itself, and by Holdfast."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - DCP's own metadata is one
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import holdfast
from holdfast import api
from holdfast.backends.foreign.dcp.writer import DcpWriter
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.export import ExportContent, ExportOptions
from holdfast.base.types.values import Group
from holdfast.errors import InvalidError
from tests.export.sources import export_by, noise, saved_by_ranks, small_model, trained_state
from tests.export.written import alike, dcp_loaded, every_kind, same

EVERYTHING = ExportOptions(model_only=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def empty_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return room for what is to be loaded, filled with what is not there."""
    return {
        name: torch.full_like(each.view(torch.uint8), 77).view(each.dtype)
        if each.numel() and each.dim() and each.dtype != torch.bool
        else torch.zeros_like(each)
        for name, each in state.items()
    }


def unflattened(folder: Path, target: Path) -> Any:
    """Return what torch's own converter makes of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, target)
    return torch.load(target, weights_only=False)  # noqa: TID251 - it is a file of torch's own


def test_every_dtype_and_shape_is_exported_bit_for_bit(tmp_path: Path) -> None:
    state = every_kind()
    holdfast.save(tmp_path / "saved", {"model": dict(state)}, process_group=False)
    options = ExportOptions(shard_bytes=5000)
    report = export_by(DcpWriter(), tmp_path / "saved", tmp_path / "out", options=options)
    assert {name: (tmp_path / "out" / name).stat().st_size for name in os.listdir(tmp_path / "out")} == report.files
    assert len(report.files) > 5
    room = {f"model.{name}": each for name, each in empty_like(state).items()}
    same(dcp_loaded(tmp_path / "out", room), {f"model.{name}": each for name, each in state.items()})
    again: Any = api.open_checkpoint(tmp_path / "out")
    same({name: again.read(f"model.{name}", framework="torch") for name in state}, state)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_several_ranks_hold_in_columns_and_flat_runs_is_put_together(tmp_path: Path, ranks: int) -> None:
    whole = {"columns": noise((53, 301), torch.float32, 1), "flat": noise((41, 97), torch.bfloat16, 2)}
    whole["flat_deep"] = noise((7, 11, 13, 5), torch.complex128, 3)
    source = saved_by_ranks(tmp_path / "run", whole, ranks)
    export_by(DcpWriter(), source, tmp_path / "out")
    same(dcp_loaded(tmp_path / "out", {"model": empty_like(whole)})["model"], whole)


def test_files_take_as_many_bytes_of_tensors_as_asked(tmp_path: Path) -> None:
    tensors = {f"m{number}": torch.full((100,), number, dtype=torch.int8) for number in range(7)}
    tensors["large"] = torch.ones(1000, dtype=torch.int8)
    holdfast.save(tmp_path / "saved", {"model": tensors}, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out", to="dcp", shard_bytes=300)
    placed: dict[str, int] = {}
    metadata = pickle.loads((tmp_path / "out" / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        placed[info.relative_path] = placed.get(info.relative_path, 0) + tensors[index.fqn[6:]].numel()
    assert sorted(placed.values()) == [100, 300, 300, 1000]


def test_metadata_is_what_dcp_itself_writes(tmp_path: Path) -> None:
    state: Any = trained_state()
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=FLAT)
    plain = {"note": "plain", "count": 3, "nested": {"pair": (1, 2), "list": [1, [2, 3]], "mixed": [{"a": 1}, 2]}}
    holdfast.save(tmp_path / "saved", {**state, **plain}, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "ours", to="dcp", model_only=False)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model, "optimizer": optimizer, **plain}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version
    alike(
        unflattened(tmp_path / "ours", tmp_path / "ours.pt"), unflattened(tmp_path / "theirs", tmp_path / "theirs.pt")
    )


@pytest.mark.parametrize("flat", [True, False])
def test_a_training_resumes_from_it_through_dcp(tmp_path: Path, flat: bool) -> None:
    """An optimizer that is not flattened has other keys for its groups: only its state is asked for."""
    state: Any = trained_state()
    holdfast.save(tmp_path / "saved", state, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out", to="dcp", model_only=False)
    fresh: Any = trained_state()
    for each in (*fresh["model"].parameters(), *[s["exp_avg"] for s in fresh["optimizer"].state.values()]):
        torch.nn.init.zeros_(each)
    fresh["optimizer"].param_groups[0]["lr"] = 99.0
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(fresh["model"], fresh["optimizer"], options=options)
    room: dict[str, Any] = {"model": model, "optimizer": optimizer if flat else {"state": optimizer["state"]}}
    dcp_loaded(tmp_path / "out", room)
    if flat:
        set_state_dict(
            fresh["model"], fresh["optimizer"], model_state_dict=model, optim_state_dict=optimizer, options=options
        )
        alike(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())
    else:
        expected: Any = get_state_dict(state["model"], state["optimizer"])[1]
        alike(optimizer["state"], expected["state"])
    same(model, state["model"].state_dict())


def test_what_is_exported_is_loaded_by_holdfast_again(tmp_path: Path) -> None:
    state: Any = trained_state()
    holdfast.save(tmp_path / "saved", state, process_group=False)
    api.export(tmp_path / "saved", tmp_path / "out", to="dcp", model_only=False)
    fresh: Any = trained_state()
    for each in (*fresh["model"].parameters(), *[s["exp_avg"] for s in fresh["optimizer"].state.values()]):
        torch.nn.init.zeros_(each)
    fresh["note"] = ""
    report = holdfast.load(tmp_path / "out", fresh, process_group=False)
    assert report.missing == report.unexpected == ()
    assert fresh["note"] == "plain"
    same(fresh["model"].state_dict(), state["model"].state_dict())
    alike(fresh["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_a_model_alone_keeps_its_key_and_is_cast(tmp_path: Path) -> None:
    model = small_model()
    holdfast.save(tmp_path / "saved", {"net": model, "optimizer": torch.optim.SGD(model.parameters())})
    api.export(tmp_path / "saved", tmp_path / "out", to="dcp", dtype="float16")
    found = unflattened(tmp_path / "out", tmp_path / "out.pt")
    assert set(found) == {"net"}
    same(found["net"], {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()})


def test_a_checkpoint_of_another_system_is_exported_without_one_of_ours_between(tmp_path: Path) -> None:
    state: Any = trained_state()
    torch.save({"model": state["model"].state_dict(), "step": 4}, tmp_path / "state.pt")  # noqa: TID251 - the source
    api.export(tmp_path / "state.pt", tmp_path / "out", to="dcp", model_only=False)
    found = unflattened(tmp_path / "out", tmp_path / "again.pt")
    assert found["step"] == 4
    same(found["model"], state["model"].state_dict())


def test_two_of_one_key_are_refused() -> None:
    tree = Group("dict", {"a": {"b": [1]}, "a.b": 2})
    with pytest.raises(InvalidError, match=r"a\.b: two values"):
        DcpWriter().files(ExportContent({"w": TensorSpec("w", "int8", (1,))}, {}, tree), EVERYTHING)


def test_what_cannot_be_kept_is_refused_with_its_key() -> None:
    with pytest.raises(InvalidError, match=r"note\.x: a slice"):
        DcpWriter().files(ExportContent({}, {}, Group("dict", {"note": {"x": slice(1)}})), EVERYTHING)


def test_items_that_are_alike_are_laid_out_once() -> None:
    """Or a model of many parameters would take gigabytes of archives of the same few hyperparameters."""
    names = [f"layer{number}" for number in range(200)]
    fqns = [f"optimizer.state.{name}.exp_avg" for name in names]
    tensors = {fqn: TensorSpec(fqn, "float32", (8, 8)) for fqn in fqns}
    values = {"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "maximize": False}
    members = {"hyperparameters": {"h": values}, "param_groups": dict.fromkeys(names, "h"), "state": {}}
    tree = Group("dict", {"optimizer": Group("optimizer", dict(members))})
    file, _ = DcpWriter().files(ExportContent(tensors, {}, tree), EVERYTHING)
    assert len(file.tensors) == len(file.checksums) == 200
    assert [each.fqn for each in file.tensors] == list(tensors)
    assert len(file.literals) == 200 * (2 + len(values))
    assert len({id(data) for _, data in file.literals}) == 2 + len(values)
