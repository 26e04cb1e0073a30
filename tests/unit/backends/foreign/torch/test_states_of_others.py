"""States as training scripts save them with torch, loaded into the objects they came from."""

from __future__ import annotations

import collections
import datetime
import zipfile
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import InvalidError


def saved(state: object, path: Path, **choices: Any) -> None:
    torch.save(state, path, **choices)  # noqa: TID251 - what is read here


class Averages:
    """Keeps averages of parameters, as such classes do: a flat dict of tensors."""

    def __init__(self, value: float) -> None:
        self.shadow = {"w": torch.full((3,), value), "b": torch.full((2,), value)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = dict(state)


class NestedAverages(Averages):
    """Keeps them a level deeper."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow), "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["decay"] == 0.9
        self.shadow = dict(state["shadow"])


@pytest.mark.parametrize("kind", [Averages, NestedAverages])
def test_an_object_of_which_the_state_is_tensors(tmp_path: Path, kind: type[Averages]) -> None:
    saved({"ema": kind(1).state_dict(), "n": 1}, tmp_path / "x.pt")
    target = kind(0)
    holdfast.load(tmp_path / "x.pt", {"ema": target, "n": 0}, process_group=False)
    assert torch.equal(target.shadow["w"], torch.ones(3))
    assert torch.equal(target.shadow["b"], torch.ones(2))


def _stepped(module: nn.Module, parameters: list[Any]) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    sum((each**2).sum() * (at + 1) for at, each in enumerate(module.parameters())).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def _numbered(order: list[int]) -> tuple[nn.ParameterList, list[nn.Parameter]]:
    torch.manual_seed(0)
    module = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
    return module, [module[at] for at in order]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2], [2]])
def test_parameters_of_which_the_names_are_numbers(tmp_path: Path, order: list[int]) -> None:
    module, parameters = _numbered(order)
    optimizer = _stepped(module, parameters)
    saved({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    fresh, others = _numbered(order)
    target = torch.optim.Adam(others)
    holdfast.load(tmp_path / "x.pt", {"model": fresh, "optimizer": target}, process_group=False)
    for mine, theirs in zip(others, parameters, strict=True):
        assert torch.equal(target.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert len(target.state) == len(order)


def test_a_number_that_is_the_name_of_a_parameter_without_state(tmp_path: Path) -> None:
    module, parameters = _numbered([1, 0])
    module[0].requires_grad_(False)
    optimizer = torch.optim.Adam(parameters)
    module[1].sum().backward()
    optimizer.step()
    saved({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    fresh, others = _numbered([1, 0])
    target = torch.optim.Adam(others)
    holdfast.load(tmp_path / "x.pt", {"model": fresh, "optimizer": target}, process_group=False)
    assert torch.equal(target.state[fresh[1]]["exp_avg"], optimizer.state[module[1]]["exp_avg"])
    assert fresh[0] not in target.state


def _named(*, is_reversed: bool, names: str = "abc") -> tuple[nn.ModuleDict, list[Any]]:
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    return module, list(module.named_parameters())[:: -1 if is_reversed else 1]


def test_names_that_the_file_tells_go_before_places(tmp_path: Path) -> None:
    module, parameters = _named(is_reversed=False)
    optimizer = _stepped(module, parameters)
    saved({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    fresh, others = _named(is_reversed=True)
    target = torch.optim.Adam(others)
    holdfast.load(tmp_path / "x.pt", {"model": fresh, "optimizer": target}, process_group=False)
    for name, parameter in fresh.named_parameters():
        known = optimizer.state[module.get_parameter(name)]
        assert torch.equal(target.state[parameter]["exp_avg"], known["exp_avg"])
    assert target.param_groups[0]["lr"] == 0.1


def test_names_that_contradict_the_places_are_refused(tmp_path: Path) -> None:
    module, parameters = _named(is_reversed=True, names="abd")
    optimizer = _stepped(module, parameters)
    fresh, others = _named(is_reversed=False)
    target = torch.optim.Adam(others)
    saved({"model": fresh.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(InvalidError, match=r"at the position of c\.weight the checkpoint has a\.weight"):
        holdfast.load(tmp_path / "x.pt", {"model": fresh, "optimizer": target}, process_group=False)


def test_state_at_the_place_of_another_parameter_is_refused_by_shape(tmp_path: Path) -> None:
    module = nn.Linear(3, 5)
    optimizer = _stepped(module, list(module.parameters()))
    saved({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    target = torch.optim.Adam(list(module.parameters())[::-1])
    with pytest.raises(InvalidError, match=r"optimizer\.state\..*at the position of this parameter"):
        holdfast.load(tmp_path / "x.pt", {"model": module, "optimizer": target}, process_group=False)


VALUES = {
    "defaultdict of int": (collections.defaultdict(int, a=1), {"a": 1}),
    "defaultdict of str": (collections.defaultdict(str, a="b"), {"a": "b"}),
    "range": (range(3), "builtins.range"),
    "a type": (int, "builtins.int"),
    "a zone": (datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "datetime.datetime"),
    "Ellipsis": (..., "builtins.Ellipsis"),
    "datetime64": (np.datetime64("2020-01-01"), "numpy.datetime64"),
    "array of datetime64": (np.array(["2020-01-01"], "M8[D]"), "ndarray"),
    "records": (np.zeros(2, [("a", "i4")]), "ndarray"),
    "objects": (np.array([None]), "ndarray"),
    "record": (np.zeros(2, [("a", "i4")])[0], "numpy.void"),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_not_kept_keeps_nobody_from_the_rest(tmp_path: Path, name: str, protocol: int) -> None:
    value, expected = VALUES[name]
    saved({"w": torch.ones(2), "v": value, "n": 1}, tmp_path / "x.pt", pickle_protocol=protocol)
    found = holdfast.open_checkpoint(tmp_path / "x.pt")
    assert "w" in found.tensors
    if isinstance(expected, dict):
        held: dict[str, Any] = {"w": torch.zeros(2), "v": dict.fromkeys(expected), "n": 0}
        holdfast.load(tmp_path / "x.pt", held, process_group=False)
        assert held["v"] == expected
    else:
        [remark] = found.remarks
        assert remark.startswith("v: left out; it is a ") and expected in remark


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_torchscript_archive_is_refused_as_what_it_is(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "x.pt")
    with pytest.raises(InvalidError, match="a TorchScript archive"):
        holdfast.open_checkpoint(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as made:
        assert any("/code/" in name for name in made.namelist())
