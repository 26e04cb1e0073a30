"""Predicted peaks: casts of weights stay until the forward ends, and no replay outlives the backward of its unit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from holdfast import activations
from holdfast.activations.plan import ActivationPlan
from holdfast.activations.runtime.peak import peak_bytes
from holdfast.activations.runtime.replay import _ReplayMode
from holdfast.activations.solve.master import chosen_columns
from holdfast.activations.solve.timeline import step_peak

CPU, WIDTH, BLOCKS = torch.device("cpu"), 32, 4


class Block(nn.Module):
    """RMSNorm, whose sum is changed in place, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down, self.dropout = nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return hidden + self.dropout(self.down(functional.silu(self.gate(normed)) * self.up(normed)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden).float()
        for block in self.blocks:
            hidden = block(hidden)
        return functional.log_softmax(self.head(hidden), -1).square().mean()


def fitted(model: Model, *, has_autocast: bool) -> tuple[ActivationPlan, Callable[[], torch.Tensor]]:
    batch = torch.randn(64, WIDTH)
    gradients = [torch.zeros_like(each) for each in model.parameters()]

    def step() -> torch.Tensor:
        torch.manual_seed(1)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.zero_()  # Memory of before the step, so that activations alone are measured.
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            loss: torch.Tensor = model(batch)
        loss.backward()
        return loss

    return activations.fit(model, step, budget="90%"), step


def require_predicted(
    plan: ActivationPlan, model: Model, step: Callable[[], torch.Tensor], choice: Sequence[int], most: float
) -> None:
    solved = plan.solved
    predicted = step_peak(solved.profile, chosen_columns(solved.profile, solved.columns, choice)).bytes
    chosen = ActivationPlan(replace(solved, choice=tuple(choice), predicted_peak_bytes=predicted))
    with chosen.apply(model):
        step()  # Every unit is traced.
        measured = peak_bytes(step, CPU)[1]
    assert 0.98 < predicted / measured < most, (choice, predicted, measured)


def test_a_replay_ends_with_the_backward_of_its_unit() -> None:
    """A replay that skipped an op in place was held by its own hooks until the whole backward ended."""
    model = Model()
    plan, step = fitted(model, has_autocast=False)
    (unit,), columns = plan.solved.profile.classes, plan.solved.columns[0]
    in_place = next(op.number for op in unit.ops if op.overload.startswith("aten.add_"))
    skipping = next(at for at, each in enumerate(columns) if each.run and in_place not in each.run)
    alive: list[int] = []

    def count(*_: object) -> None:
        alive.append(sum(isinstance(each, _ReplayMode) for each in gc.get_objects()))

    with ActivationPlan(replace(plan.solved, choice=(skipping,) * BLOCKS)).apply(model):
        model.blocks[0].register_full_backward_pre_hook(count)
        step()
        step()
    assert max(alive) <= 1, alive


@pytest.mark.long  # bfloat16 is slow on many processors.
def test_casts_stay_until_the_forward_ends() -> None:
    model = Model()
    plan, step = fitted(model, has_autocast=True)
    drawn, sizes = random.Random(3), [len(plan.solved.columns[kind]) for _, kind in plan.solved.profile.order]
    for choice in [[size - 1 for size in sizes], *([drawn.randrange(size) for size in sizes] for _ in range(2))]:
        require_predicted(plan, model, step, choice, 1.25)
