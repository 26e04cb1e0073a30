"""Everything that a model has comes from the checkpoint, and the report proves it by count and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.errors import InvalidError


class Tied(nn.Module):
    """Tied weights, a frozen backbone, buffers kept and not kept, an empty and a 0-d tensor."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.backbone = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("scratch", torch.ones(1000), persistent=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        if extra:
            self.gate = nn.Parameter(torch.ones(7))


def unique(model: nn.Module) -> dict[int, torch.Tensor]:
    return {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in unique(model).values())


def saved(tmp_path: Path, model: nn.Module) -> Path:
    holdfast.save(tmp_path / "c", {"model": model, "step": 3}, process_group=False)
    return tmp_path / "c"


def test_the_report_counts_each_tensor_of_the_model_once(tmp_path: Path) -> None:
    path = saved(tmp_path, Tied())
    model = Tied()
    report = holdfast.load(path, {"model": model}, process_group=False)
    assert report.tensors == len(unique(model)) == len(report.loaded)
    assert report.tensor_bytes == report.loaded_bytes == bytes_of(model) > 0
    assert report.missing == report.skipped == ()


def test_the_optimizer_counts_too(tmp_path: Path) -> None:
    def state() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = state()
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    model, optimizer = state()
    report = holdfast.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    assert report.tensors == 2 + 2 * 3
    assert report.tensor_bytes == report.loaded_bytes == 8 * 4 + 2 * (8 * 4) + 2 * 4


def test_what_is_cast_is_counted_in_the_memory_it_fills(tmp_path: Path) -> None:
    path = saved(tmp_path, Tied())
    model = Tied().double()
    report = holdfast.load(path, {"model": model}, cast=True, process_group=False)
    assert report.tensor_bytes == report.loaded_bytes == bytes_of(model)
    assert report.tensor_bytes > bytes_of(Tied())


def test_what_is_skipped_is_reported_and_not_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, Tied())
    model = Tied()
    report = holdfast.load(path, {"model": model}, skip="model.backbone.*", process_group=False)
    assert set(report.skipped) == {"model.backbone.weight", "model.backbone.bias"}
    assert report.tensors == len(unique(model)) - 2
    assert report.tensor_bytes == report.loaded_bytes == bytes_of(model) - 4 * (16 + 4)


def test_a_parameter_more_than_saved_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, Tied())
    model = Tied(extra=True)
    before = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    with pytest.raises(InvalidError, match=r"1 missing from the checkpoint: model\.gate"):
        holdfast.load(path, {"model": model}, process_group=False)
    assert all(torch.equal(tensor, before[fqn]) for fqn, tensor in model.state_dict().items())


def test_without_strict_the_report_tells_what_did_not_come(tmp_path: Path) -> None:
    path = saved(tmp_path, Tied())
    model = Tied(extra=True)
    model.second = model.gate
    report = holdfast.load(path, {"model": model}, strict=False, process_group=False)
    assert report.missing == ("model.gate", "model.second")
    assert report.tensors == len(unique(model)) == len(report.loaded) + 1
    assert report.tensor_bytes == bytes_of(model) == report.loaded_bytes + 7 * 4


@pytest.mark.parametrize("late", [False, True])
def test_a_tied_tensor_that_came_under_one_name_lacks_nothing(tmp_path: Path, *, late: bool) -> None:
    holdfast.save(tmp_path / "c", {"m": {"m": torch.ones(3)}}, process_group=False)
    target = torch.zeros(3)
    state = {"m": {"m": target, "z": target} if late else {"a": target, "m": target}}
    report = holdfast.load(tmp_path / "c", state, strict=False, process_group=False)
    assert report.missing == ("m.z" if late else "m.a",)
    assert (report.tensors, report.tensor_bytes, report.loaded_bytes) == (1, 12, 12)


@pytest.mark.parametrize("kept", ["gate", "second"])
def test_another_system_keeps_a_tied_tensor_under_one_of_its_names(tmp_path: Path, kept: str) -> None:
    """As Hugging Face does; a name of memory that nothing fills is missing all the same."""
    torch.manual_seed(1)
    model = Tied(extra=True)
    model.second = model.gate
    content = {name: tensor for name, tensor in model.state_dict().items() if name not in {"gate", "second"} - {kept}}
    save_file({name: tensor.clone() for name, tensor in content.items()}, tmp_path / "model.safetensors")
    for whole in (True, False):
        torch.manual_seed(2)
        fresh = Tied(extra=True)
        fresh.second = fresh.gate
        state = {"model": fresh if whole else fresh.state_dict()}
        report = holdfast.load(tmp_path, state, process_group=False)
        assert report.missing == ()
        assert report.tensor_bytes == report.loaded_bytes
        for name, tensor in model.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], tensor), name
    apart = Tied(extra=True)
    apart.second = torch.nn.Parameter(apart.gate.detach().clone())
    before = {name: tensor.clone() for name, tensor in apart.state_dict().items()}
    lacking = "second" if kept == "gate" else "gate"
    with pytest.raises(InvalidError, match=f"1 missing from the checkpoint: model.{lacking}"):
        holdfast.load(tmp_path, {"model": apart}, process_group=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in apart.state_dict().items())
