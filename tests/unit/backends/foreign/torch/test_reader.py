"""Files of torch.save: every tensor bit-exact where it lies, values as they were, ties as ties."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import holdfast
from holdfast.backends.foreign.torch.reader import TorchSaveFormat
from holdfast.backends.stores.foreign import ForeignFiles
from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef
from holdfast.errors import CorruptError, InvalidError
from tests.unit.backends.foreign.torch.torch_states import leaves, listed, nested, read, same_bits, saved


@settings(max_examples=150, deadline=None)
@given(state=nested(), protocol=st.sampled_from([2, 3, 4, 5]))
def test_any_nested_state_reads_back_bit_exact(state: dict[str, Any], protocol: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved({"outer": state, "step": 3}, Path(folder), pickle_protocol=protocol)
        listing = listed(path)
        expected = leaves({"outer": state})
        assert {name for name, _ in expected} == {*listing.tensors, *listing.aliases}
        for name, tensor in expected:
            assert same_bits(read(listing, name, Path(folder)), tensor), name
        assert listing.tree.items["step"] == 3
        assert listing.files == {path.name: path.stat().st_size}


@settings(max_examples=60, deadline=None)
@given(state=nested())
def test_two_names_of_one_view_are_tied_and_no_others(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listing = listed(saved({"outer": state, "step": 3}, Path(folder)))
        first: dict[object, str] = {}
        for name, tensor in leaves({"outer": state}):
            storage = tensor.untyped_storage().data_ptr(), tensor.dtype
            memory = (storage, tensor.storage_offset(), tensor.shape, tensor.stride()) if tensor.numel() else name
            assert listing.aliases.get(name, name) == first.setdefault(memory, name)


def test_a_bare_state_dict_stands_under_model(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    path = saved(module.state_dict(), tmp_path)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    holdfast.load(path, {"model": other})
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert listed(path).tree == Group("dict", {"model": Group("module")})


def test_extra_state_stands_in_the_module(tmp_path: Path) -> None:
    path = saved(OrderedDict(w=torch.ones(2), _extra_state={"scale": 2.0}), tmp_path)
    assert listed(path).tree == Group("dict", {"model": Group("module", {"_extra_state": {"scale": 2.0}})})


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    listing = listed(saved({"model": module.state_dict(), "step": 1}, tmp_path))
    assert list(listing.tensors) == ["model.embed.weight"]
    assert listing.aliases == {"model.head.weight": "model.embed.weight"}


def test_an_everyday_training_state_resumes(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    def stepped(state: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(5)
        for _ in range(3):
            state["optimizer"].zero_grad()
            loss = state["model"](torch.randn(6, 4)).square().sum()
            loss.backward()
            state["optimizer"].step()
            state["schedule"].step()
        return loss

    torch.manual_seed(1)
    first = made()
    stepped(first)
    path = saved({key: each.state_dict() for key, each in first.items()} | {"epoch": 7}, tmp_path)
    second = made()
    report = holdfast.load(path, second)
    assert not report.missing and not report.unexpected
    for key in first:
        _assert_same(first[key].state_dict(), second[key].state_dict())
    assert torch.equal(stepped(first), stepped(second))
    assert holdfast.load(path, {"model": made()["model"], "epoch": 0}).missing == ()


@pytest.mark.parametrize("by_name", [False, True], ids=["numbers", "names"])
def test_an_optimizer_alone_stands_under_optimizer(by_name: bool, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))

    model, optimizer = made()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    path = saved(get_optimizer_state_dict(model, optimizer) if by_name else optimizer.state_dict(), tmp_path)
    other_model, other = made()
    other.param_groups[0]["lr"] = 3.0
    holdfast.load(path, {"model": other_model, "optimizer": other}, only=["optimizer.*"])
    _assert_same(optimizer.state_dict(), other.state_dict())


def test_an_optimizer_of_other_groups_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0, momentum=0.5)
    with pytest.raises(InvalidError, match=r"optimizer: groups of \[1, 1\] parameters, and of \[2\] in the checkpoint"):
        holdfast.load(path, {"model": model, "optimizer": other})


def test_values_come_as_they_were(tmp_path: Path) -> None:
    values = {
        "text": "é", "none": None, "list": [1, (2.5, {"x": b"bytes"})], 3: "number", "set": {1, 2},
        "array": np.arange(4, dtype=np.int16), "scalar": np.float64(2.5), "path": pathlib.Path("a/b"),
        "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
    }  # fmt: skip
    tree = listed(saved({"w": torch.ones(1), "values": values, "version": torch.__version__}, tmp_path)).tree
    found: Any = tree.items["values"]
    assert found.pop("array").tolist() == [0, 1, 2, 3]
    del values["array"]
    values |= {"dtype": FrameworkValue("torch.dtype", "bfloat16"), "device": FrameworkValue("torch.device", "cuda:1")}
    assert found == values
    assert list(found) == list(values)
    assert type(found["scalar"]) is np.float64
    assert tree.items["version"] == str(torch.__version__)


def test_tensors_in_lists_and_under_numbers_are_referred_to(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    listing = listed(saved({"rng": [tensor, 1], "by_number": {0: {"m": torch.ones(2)}}}, tmp_path))
    assert listing.tree.items == {
        "rng": [TensorRef("rng.0"), 1],
        "by_number": {0: {"m": TensorRef("by_number.0.m")}},
    }
    assert torch.equal(read(listing, "rng.0", tmp_path), tensor)


@pytest.mark.parametrize("value", [torch.arange(4.0), [torch.ones(2), 3], 5])
def test_what_is_no_dict_stands_under_value(value: Any, tmp_path: Path) -> None:
    listing = listed(saved(value, tmp_path))
    assert all(fqn.startswith("value") for fqn in listing.tensors)
    assert list(listing.tensors) or listing.tree.items == {"value": 5}


def test_parameters_and_tensors_with_attributes_are_tensors(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    tensor.note = "kept nowhere"  # type: ignore[attr-defined]
    state = {"p": torch.nn.Parameter(torch.zeros(2)), "t": tensor, "grad": torch.ones(1, requires_grad=True)}
    assert list(listed(saved(state, tmp_path)).tensors) == ["model.p", "model.t", "model.grad"]


def test_a_transposed_matrix_comes_to_its_columns(tmp_path: Path) -> None:
    listing = listed(saved({"t": torch.arange(600.0).reshape(20, 30).t()}, tmp_path))
    assert len(listing.pieces["model.t"]) == 20
    path = tmp_path / "state.pt"
    state = {"model": {"t": torch.zeros(30, 20)}}
    holdfast.load(path, state)
    assert torch.equal(state["model"]["t"], torch.arange(600.0).reshape(20, 30).t())


def test_a_tensor_of_too_many_runs_is_refused(tmp_path: Path) -> None:
    path = saved({"good": torch.ones(3), "every_other": torch.zeros(140_000)[::2]}, tmp_path)
    with pytest.raises(InvalidError, match=r"every_other.*70000 runs.*\.contiguous\(\)"):
        listed(path)


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"two tensors are named 'a\.b'"):
        listed(saved({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path))


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"w": torch.eye(3).to_sparse()}, "sparse tensor; save .to_dense"),
        ({"w": torch.ones(2, device="meta")}, "meta device"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "resolve_conj"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear.*state_dict"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_read_is_refused_by_name(state: object, match: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=match):
        listed(saved(state, tmp_path))


def test_a_distributed_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
        path = saved({"w": tensor}, tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(InvalidError, match=r"class torch\.distributed\.tensor\.DTensor.*full_tensor"):
        listed(path)


def test_an_object_is_left_out_with_a_remark(tmp_path: Path) -> None:
    values = {"args": argparse.Namespace(lr=1, start=torch.ones(2)), "rest": [argparse.Namespace(), 3]}
    path = saved({"model": {"w": torch.ones(1)}, "values": values, "step": 4}, tmp_path)
    listing = listed(path)
    assert listing.tree.items["values"] == {
        "args": Skipped("values.args"), "rest": [Skipped("values.rest.0"), 3],
    }  # fmt: skip
    assert [each.partition(". ")[0] for each in listing.remarks] == [
        "values.args: left out; it is a argparse.Namespace, with 1 tensors in it",
        "values.rest.0: left out; it is a argparse.Namespace",
    ]
    state: dict[str, Any] = {"model": {"w": torch.zeros(1)}, "step": 0}
    holdfast.load(path, state)
    assert state["step"] == 4


def test_the_old_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved({"w": torch.ones(2)}, tmp_path, _use_new_zipfile_serialization=False)
    assert TorchSaveFormat().recognises(ForeignFiles(tmp_path), path.name)
    with pytest.raises(InvalidError, match=r"torch before 1\.6.*weights_only=True"):
        holdfast.open_checkpoint(path)


def test_a_file_cut_short_anywhere_is_corrupt(tmp_path: Path) -> None:
    path = saved({"model": {"w": torch.ones(40), "b": torch.zeros(3)}, "step": 5}, tmp_path)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptError, match=r"state\.pt"):
            listed(path)


def _assert_same(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert same_bits(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            _assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            _assert_same(one, other)
    else:
        assert first == second
