"""The seconds of units in a step: forward and backward, each by the unit that runs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.activations.runtime.measure import timed_units

FORWARD, BACKWARD = 0.06, 0.12


def work(seconds: float) -> None:
    stop = time.thread_time() + seconds
    while time.thread_time() < stop:
        pass


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        work(forward)
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        work(ctx.backward_seconds)
        return gradient * 2, None, None


class Working(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds, self.weight = (forward, backward), nn.Parameter(torch.ones(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Work.apply(rows * self.weight, *self.seconds)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("has_gradient", [True, False])
def test_each_unit_has_the_seconds_of_its_forward_and_backward(has_gradient: bool) -> None:
    units = {"a": Working(FORWARD, BACKWARD), "b": Working(0.0, BACKWARD), "c": Working(FORWARD, 0.0)}
    rows = torch.ones(3, 4, requires_grad=has_gradient)
    with timed_units(units, torch.device("cpu")) as spent:
        made = rows
        for unit in units.values():
            made = unit(made)
        made.sum().backward()
    for name, unit in units.items():
        assert spent[name] == pytest.approx(sum(unit.seconds), abs=0.03), name
    assert not rows._backward_hooks and not any(each._forward_hooks for each in units.values())
