"""Models, optimizers and objects loaded out of what torch saved with `get_state_dict`, torchtitan and by number."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

import holdfast
from holdfast.errors import InvalidError
from tests.support.small_networks import adamw, digests, plain, train
from tests.unit.backends.foreign.dcp.test_saved_by_torch import saved


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("old", [False, True], ids=["now", "as before torch 2.4"])
def test_a_model_and_its_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flatten: bool, old: bool) -> None:
    if old:
        monkeypatch.setattr(_nested_dict._version, "_derived_version", "2_3")
    net = plain(1)
    optimizer = adamw(net)
    train(net, optimizer)
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    path = saved(tmp_path / "ck", {"model": model, "optimizer": optim})
    net_again = plain(2)
    optimizer_again = adamw(net_again)
    for group in optimizer_again.param_groups:
        group["lr"], group["weight_decay"] = 9.0, 9.0
    report = holdfast.load(path, {"model": net_again, "optimizer": optimizer_again})
    assert report.missing == report.unexpected == ()
    assert digests(net_again, optimizer_again) == digests(net, optimizer)


def test_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    net = plain(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    names = [name for name, _ in net.named_parameters()]
    optim = {"state": {}, "param_groups": [{**optimizer.state_dict()["param_groups"][0], "params": names}]}
    path = saved(tmp_path / "ck", {"model": net.state_dict(), "optimizer": optim})
    again = torch.optim.SGD(plain(2).parameters(), lr=1.0)
    net_again = plain(2)
    again = torch.optim.SGD(net_again.parameters(), lr=1.0)
    holdfast.load(path, {"model": net_again, "optimizer": again})
    assert again.param_groups[0]["lr"] == 0.25
    assert digests(net_again, again) == digests(net, optimizer)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_learning_rate_that_is_a_tensor_is_a_hyperparameter(tmp_path: Path, flatten: bool) -> None:
    net = plain(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.125), capturable=False)
    train(net, optimizer, 1)
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    path = saved(tmp_path / "ck", {"model": model, "optimizer": optim})
    net_again = plain(2)
    again = torch.optim.Adam(net_again.parameters(), lr=torch.tensor(1.0))
    holdfast.load(path, {"model": net_again, "optimizer": again})
    assert torch.equal(again.param_groups[0]["lr"], torch.tensor(0.125))
    assert digests(net_again, again) == digests(net, optimizer)


@pytest.mark.parametrize("flatten", [False, True])
def test_what_of_a_group_holds_tensors_or_cannot_be_had(tmp_path: Path, flatten: bool) -> None:
    net = torch.nn.Linear(3, 2)
    odd = argparse.Namespace(a=1)
    group = {"betas": (torch.tensor(0.5), 0.75), "deep": {"x": [torch.tensor(3)]}, "odd": odd, "lr": 0.125}
    state = {"weight": {"odd": [odd], "count": 2}}
    optim: dict[str, object] = {"state": state, "param_groups": [{**group, "params": ["weight", "bias"]}]}
    if flatten:
        optim = {"state.weight.count": 2, "state.weight.odd": odd} | {
            f"param_groups.{name}.{key}": value for name in ("weight", "bias") for key, value in group.items()
        }
    path = saved(tmp_path / "ck", {"model": net.state_dict(), "optimizer": optim})
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer.param_groups[0]["odd"] = "own"
    report = holdfast.load(path, {"model": net, "optimizer": optimizer})
    assert report.missing == report.unexpected == ()
    (found,) = optimizer.param_groups
    assert found["betas"] == (torch.tensor(0.5), 0.75)
    assert found["deep"] == {"x": [torch.tensor(3)]}
    assert found["lr"] == 0.125
    assert found["odd"] == "own"
    assert optimizer.state[net.weight] == {"count": 2}


@pytest.mark.parametrize("flatten", [False, True])
def test_state_that_nests_and_state_that_is_a_number(tmp_path: Path, flatten: bool) -> None:
    net = torch.nn.Linear(3, 2)
    state = {
        name: {"count": 4, "factors": {"left": torch.full((2, 2), 1.0), "right": torch.full((3, 3), 2.0)}}
        for name in ("weight", "bias")
    }
    groups = [{"lr": 0.5, "params": ["weight", "bias"]}]
    optim: dict[str, object] = {"state": state, "param_groups": groups}
    if flatten:
        optim = dict(torch.distributed.checkpoint.state_dict._flatten_optim_state_dict(optim))  # type: ignore[arg-type]
    path = saved(tmp_path / "ck", {"model": net.state_dict(), "optimizer": optim})
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    holdfast.load(path, {"model": net, "optimizer": optimizer})
    found = optimizer.state[net.weight]
    assert found["count"] == 4
    assert torch.equal(found["factors"]["left"], torch.full((2, 2), 1.0))
    assert torch.equal(found["factors"]["right"], torch.full((3, 3), 2.0))
    assert optimizer.param_groups[0]["lr"] == 0.5


class Tied(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(700, 900)
        self.head = torch.nn.Linear(900, 700, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_of_which_dcp_keeps_each_by_itself(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = Tied()
    path = saved(tmp_path / "ck", {"model": net.state_dict()})
    again = Tied()
    report = holdfast.load(path, {"model": again})
    assert report.missing == report.unexpected == ()
    assert torch.equal(again.head.weight, net.head.weight)
    assert again.head.weight is again.embedding.weight


@pytest.mark.parametrize("differs", [0, 629_999])
def test_parameters_that_are_tied_now_and_were_not(tmp_path: Path, differs: int) -> None:
    net = Tied()
    head = net.head.weight.detach().clone()
    head.view(-1)[differs] += 1
    path = saved(tmp_path / "ck", {"model": {**net.state_dict(), "head.weight": head}})
    with pytest.raises(InvalidError, match="the checkpoint holds different values for the two"):
        holdfast.load(path, {"model": Tied()})


def test_torchtitans_names(tmp_path: Path) -> None:
    net = plain(1)
    optimizer = adamw(net)
    train(net, optimizer)
    _, optim = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    state = {**get_model_state_dict(net), "optimizer": optim, "train_state": {"step": torch.tensor(7)}, "lr": {"e": 3}}
    path = saved(tmp_path / "ck", state)
    net_again = plain(2)
    again = adamw(net_again)
    target = {
        **dict(net_again.named_parameters()),
        **dict(net_again.named_buffers()),
        "optimizer": again,
        "train_state": {"step": torch.tensor(0)},
        "lr": {"e": 0},
    }
    report = holdfast.load(path, target)
    assert report.missing == report.unexpected == ()
    assert digests(net_again, again) == digests(net, optimizer)
    assert target["lr"] == {"e": 3}
    assert target["train_state"] == {"step": torch.tensor(7)}


class Position:
    """Where a data loader stands: tensors and numbers, some of them deeper."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.taken: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        at = self.at
        return {"at": torch.tensor(at), "name": f"at {at}", "deep": {"sum": torch.full((2,), at), "list": [at]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = state_dict
        self.at = int(state_dict["at"])


def test_objects_take_their_state_back(tmp_path: Path) -> None:
    net = plain(1)
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    train(net, optimizer)
    scheduler.step()
    path = saved(tmp_path / "ck", {"scheduler": scheduler, "data": Position(7)})
    again = torch.optim.lr_scheduler.StepLR(adamw(plain(2)), 9)
    position = Position(1)
    report = holdfast.load(path, {"scheduler": again, "data": position})
    assert report.missing == report.unexpected == ()
    assert again.state_dict() == scheduler.state_dict()
    assert position.at == 7
    assert position.taken["name"] == "at 7"
    assert torch.equal(position.taken["deep"]["sum"], torch.full((2,), 7))
    assert position.taken["deep"]["list"] == [7]


def test_an_optimizer_by_number_is_read_and_taken_by_position(tmp_path: Path) -> None:
    net = plain(1)
    optimizer = adamw(net)
    train(net, optimizer)
    path = saved(tmp_path / "ck", {"optimizer": optimizer.state_dict()})
    found = holdfast.open_checkpoint(path)
    assert "optimizer: numbers its parameters" in found.remarks[0]
    assert "optimizer.state.0.exp_avg" in found.tensors
    assert found.objects["optimizer"]["param_groups"][0]["lr"] == 0.05
    net_again = plain(2)
    again = adamw(net_again)
    holdfast.load(path, {"model": net_again, "optimizer": again}, only=["optimizer.*"])
    assert all(
        torch.equal(value, other[key])
        for state, other in zip(optimizer.state.values(), again.state.values(), strict=True)
        for key, value in state.items()
    )
