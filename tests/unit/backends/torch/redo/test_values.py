"""Values of a record are those of a save, without the price of its tensors; a redo restores them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import PerRank
from holdfast.base.ports.framework import Selection
from holdfast.base.types.values import Group, Value
from tests.support.redo_log.recorded_training import FRAMEWORK, log_of, redo


class Extra(nn.Linear):
    """Keeps a number that is no tensor."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Loader:
    """An object whose state has a tensor that is made for each answer."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": torch.full((5056,), self.position % 7, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        assert int(state["generator"][0]) == self.position % 7


class Adversaries:
    """Two networks with an optimizer each, in nested dicts and lists, and values of every kind."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.nets = {"maker": Extra(4, 4), "judge": nn.Linear(4, 1)}
        self.optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in self.nets.values()]
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in self.optimizers]
        self.loader, self.rank_loader, self.step = Loader(), Loader(), 0
        self.averages = [torch.zeros(4, 4), torch.zeros(1, 4)]

    def state(self) -> dict[str, Any]:
        objects = [[one, two, self.step] for one, two in zip(self.optimizers, self.schedules, strict=True)]
        by_rank = {"loader": PerRank(self.rank_loader), "number": PerRank(self.step)}
        values = {"step": self.step, "best": (0.5, None), "shape": torch.Size((2, self.step))}
        plain = {"loader": self.loader, "by_rank": by_rank, "values": values, "averages": self.averages}
        return {"nets": self.nets, "objects": objects, **plain}

    def train(self) -> None:
        self.step += 1
        maker, judge = self.nets.values()
        for optimizer, sign in zip(self.optimizers, (1, -1), strict=True):
            optimizer.zero_grad()
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(self.step))
            (sign * judge(maker(batch)).square().sum()).backward()
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        for average, net in zip(self.averages, self.nets.values(), strict=True):
            average.lerp_(net.weight.detach(), 0.5)  # type: ignore[arg-type]
        self.nets["maker"].calls = self.loader.position = self.rank_loader.position = self.step  # type: ignore[assignment]

    def bits(self) -> Any:
        every = (*self.nets.values(), *self.optimizers, *self.schedules, self.loader, self.rank_loader)
        return copy.deepcopy(([each.state_dict() for each in every], self.averages))


@pytest.fixture
def training() -> Adversaries:
    training = Adversaries()
    training.train()
    return training


def without_optimizers(value: Value) -> Value:
    """Return values in which a module has only what it makes, and an optimizer nothing."""
    items = value.items if isinstance(value, Group) else value
    if isinstance(value, Group) and value.kind == "stateful":
        return {key: each for key, each in value.items["state"].items() if key != "generator"}  # type: ignore[union-attr]
    if not isinstance(items, dict):
        return value
    kept = {key: without_optimizers(each) for key, each in items.items() if not is_optimizer(each)}
    return {key: each for key, each in kept.items() if each != {}}


def is_optimizer(value: Value) -> bool:
    return (isinstance(value, Group) and value.kind == "optimizer") or (isinstance(value, list) and "lr" in str(value))


def test_values_are_those_of_a_save(training: Adversaries) -> None:
    log = log_of(training.state())
    training.train()
    record = log.boundary(2, training.state())
    assert record is not None, log.capture.interrupted
    saved = FRAMEWORK.collect(training.state(), Selection())
    assert without_optimizers(record.tree) == without_optimizers(saved.tree)
    assert record.per_rank.keys() == saved.per_rank.keys()
    assert str(record.per_rank) == str(saved.per_rank)


def test_a_redo_restores_values_of_every_kind(training: Adversaries) -> None:
    log, base = log_of(training.state()), copy.deepcopy(training)
    for step in range(2, 6):
        training.train()
        assert log.boundary(step, training.state()) is not None, log.capture.interrupted
    assert [call.path for call in log.records[0].record.calls] == ["objects.0.0", "objects.1.0"]
    state = base.state()
    averages = base.averages[0]
    assert redo(state, log.records) == []
    assert state["values"] == training.state()["values"]
    assert [each[2] for each in state["objects"]] == [5, 5]
    assert state["by_rank"]["number"].value == 5
    assert state["averages"][0] is averages
    torch.testing.assert_close(base.bits(), training.bits(), rtol=0, atol=0)


def test_a_large_tensor_in_the_state_of_an_object_interrupts_with_the_remedy(training: Adversaries) -> None:
    log = log_of(training.state())
    training.loader.state_dict = lambda: {"average": torch.zeros(1 << 17)}  # type: ignore[method-assign]
    training.train()
    assert log.boundary(2, training.state()) is None
    assert "loader.average: a tensor of 131072 elements" in log.capture.interrupted


def test_an_object_that_takes_the_place_of_a_module_interrupts(training: Adversaries) -> None:
    log = log_of(training.state())
    training.nets["judge"] = nn.Linear(4, 1)
    assert log.boundary(2, training.state()) is None
    assert log.capture.interrupted == "nets.judge: was replaced by another object"


def test_a_state_dict_that_is_made_for_each_boundary_is_the_same_tensors(training: Adversaries) -> None:
    average = copy.deepcopy(training.nets["judge"])
    log, base = log_of(training.state() | {"average": average.state_dict()}), copy.deepcopy(average)
    training.train()
    with torch.no_grad():
        average.weight.data.mul_(2)  # type: ignore[operator]
    record = log.boundary(2, training.state() | {"average": average.state_dict()})
    assert record is not None, log.capture.interrupted
    assert "average.weight" in {image.fqn for image in record.images}
    resumed = Adversaries()
    resumed.train()
    assert redo(resumed.state() | {"average": base.state_dict()}, log.records) == []
    torch.testing.assert_close(base.state_dict(), average.state_dict(), rtol=0, atol=0)


def test_an_average_that_gets_other_memory_at_each_step_is_followed(training: Adversaries) -> None:
    average = copy.deepcopy(training.nets["judge"])
    log, base = log_of(training.state() | {"average": average}), copy.deepcopy(average)
    for step in range(2, 5):
        training.train()
        average.weight.data = average.weight.data * 2  # type: ignore[operator]
        assert log.boundary(step, training.state() | {"average": average}) is not None, log.capture.interrupted
    resumed = Adversaries()
    resumed.train()
    assert redo(resumed.state() | {"average": base}, log.records) == []
    torch.testing.assert_close(base.state_dict(), average.state_dict(), rtol=0, atol=0)


def test_a_module_that_leaves_the_state_interrupts(training: Adversaries) -> None:
    log = log_of(training.state())
    state = training.state()
    del state["nets"]
    assert log.boundary(2, state) is None
    assert log.capture.interrupted == "nets: is no longer in the state"
