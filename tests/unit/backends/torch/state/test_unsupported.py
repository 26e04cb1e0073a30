"""Objects that keep their state elsewhere are refused by name, at the save and at the load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's class: a module around the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class PipelineEngine(DeepSpeedEngine):
    """DeepSpeed's engines derive from one class."""


class DeepSpeedOptimizer:
    """Stands for the base class of DeepSpeed's optimizers, which is no torch optimizer."""

    def state_dict(self) -> dict[str, object]:
        raise AssertionError("asked for the state of an object that is refused")

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError(state)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The class of ZeRO-1 and 2."""


def require_refused(path: Path, state: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidError, match=match):
        holdfast.save(path / "refused", state, process_group=False)
    assert not (path / "refused").exists()
    holdfast.save(path / "good", {"model": nn.Linear(2, 2)}, process_group=False)
    with pytest.raises(InvalidError, match=match):
        holdfast.load(path / "good", state, process_group=False)


def split_by_zero3(module: nn.Module) -> nn.Module:
    for number, parameter in enumerate(module.parameters()):
        parameter.data = torch.empty(0)
        parameter.ds_id = number
    return module


def test_a_parameter_that_zero3_splits_is_refused(tmp_path: Path) -> None:
    expected = r"^model\.weight: DeepSpeed's ZeRO-3 holds this parameter \(it has a ds_id\), here with shape \(0,\).*"
    require_refused(tmp_path, {"model": split_by_zero3(nn.Linear(2, 2))}, expected + r"engine\.save_checkpoint\(\)")


def test_a_parameter_that_zero3_leaves_whole_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.bias.ds_id = 7  # type: ignore[attr-defined]
    require_refused(tmp_path, {"model": model}, r"^model\.bias: DeepSpeed's ZeRO-3 holds this parameter")


def test_a_parameter_of_zero3_in_a_dict_is_refused(tmp_path: Path) -> None:
    parameters = dict(split_by_zero3(nn.Linear(2, 2)).named_parameters())
    require_refused(tmp_path, {"model": parameters}, r"^model\.weight: DeepSpeed's ZeRO-3")
    require_refused(tmp_path / "top", dict(parameters), r"^weight: DeepSpeed's ZeRO-3")


@pytest.mark.parametrize("engine", [DeepSpeedEngine, PipelineEngine])
def test_an_engine_of_deepspeed_is_refused(tmp_path: Path, engine: type[DeepSpeedEngine]) -> None:
    expected = rf"^model: {engine.__name__} is DeepSpeed's engine, .*import_checkpoint"
    require_refused(tmp_path, {"model": engine(nn.Linear(2, 2))}, expected)


def test_an_optimizer_of_deepspeed_is_refused(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 2), "optimizer": ZeROOptimizer()}
    require_refused(tmp_path, state, r"^optimizer: ZeROOptimizer is DeepSpeed's optimizer")


class Both(torch.optim.Optimizer):
    """Two optimizers under one name, without what the base class makes."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = list(parts)


class Alone(torch.optim.Optimizer):
    """Keeps its state itself, without what the base class makes."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


class Late(torch.optim.Optimizer):
    """Makes its groups when they are first asked for, and cannot yet."""

    def __init__(self) -> None:
        self.state = {}

    @property
    def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
        raise RuntimeError("call prepare() first")


@pytest.mark.parametrize("kind", ["both", "alone", "late"])
def test_an_optimizer_without_what_its_base_class_makes_is_refused(tmp_path: Path, kind: str) -> None:
    model = nn.Linear(2, 2)
    parts = [torch.optim.Muon([model.weight]), torch.optim.AdamW([model.bias])]
    optimizer = {"both": lambda: Both(*parts), "alone": lambda: Alone([model.weight]), "late": Late}[kind]()
    what = {
        "both": r"Both\.param_groups raised AttributeError",
        "alone": r"Alone\.state raised AttributeError",
        "late": r"Late\.param_groups raised RuntimeError: call prepare\(\) first",
    }[kind]
    expected = rf"training\.opt: {what}.*super\(\).__init__.* or pass the optimizers inside it one by one"
    require_refused(tmp_path, {"model": model, "training": {"opt": optimizer}}, expected)


def test_an_optimizer_without_state_of_its_own_may_hold_others(tmp_path: Path) -> None:
    def build() -> tuple[nn.Linear, Both]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        outer = Both(one)
        outer.param_groups = one.param_groups
        return model, outer

    model, outer = build()
    model(torch.ones(1, 2)).sum().backward()
    outer.parts[0].step()
    holdfast.save(tmp_path / "c", {"model": model, "opt": outer}, process_group=False)
    other, fresh = build()
    holdfast.load(tmp_path / "c", {"model": other, "opt": fresh}, process_group=False)
    saved = outer.parts[0].state[model.weight]["momentum_buffer"]
    assert torch.equal(fresh.parts[0].state[other.weight]["momentum_buffer"], saved)
