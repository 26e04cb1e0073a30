"""Random modules under random columns: gradients, buffers and generators equal the plain module's bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

from holdfast.activations.runtime.attach import attach, trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.errors import InvalidError
from tests.unit.activations.runtime.random_units import (
    LENGTH,
    ROWS,
    WIDTH,
    RandomUnit,
    packs,
    random_column,
)

WAYS = ("plain", "autocast", "retain", "double")

MODULES = int(os.environ.get("RANDOM_MODULES", 300))
"""Modules of the long test."""


class Model(nn.Module):
    """Two random units between layers of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList([RandomUnit(seed), RandomUnit(seed + 1)])
        self.takes_two = seed % 3 == 0
        self.calls_again = seed % 5 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for unit in [*self.units, *self.units[: self.calls_again]]:
            out = unit(x, y=x.tanh()) if self.takes_two else unit(x)
            x = out[0] + out[1] if isinstance(out, tuple) else out
        return x


def step(model: nn.Module, x: torch.Tensor, way: str) -> list[torch.Tensor]:
    """Forward and backward; returns loss, gradients, buffers and the generator's state."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext():
        output = model(x)
    loss = output.float().square().mean()
    between = torch.get_rng_state()
    if way == "double":
        parameters = [x, *model.parameters()]
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        loss = loss + sum(each.float().square().sum() for each in first if each is not None)
    if way == "retain":
        loss.backward(retain_graph=True)
        torch.rand(3)
    loss.backward()
    gradients = [each.grad if each.grad is not None else torch.zeros(0) for each in (x, *model.parameters())]
    return [loss.detach(), *gradients, *model.buffers(), between, torch.get_rng_state()]


def check(seed: int, way: str) -> str:
    """Compare one model.

    Returns:
        "equal"; "plain" where all columns keep all; "refused" where plain training has an error or a unit is refused;
        "error" where a replay ended in an error that has a type for it.
    """
    rng = random.Random(seed)
    plain = Model(seed)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    model = deepcopy(plain)
    traces = trace_units(deepcopy(plain), ["units.0", "units.1"], lambda: None)
    traced = deepcopy(plain)
    traces = trace_units(
        traced, ["units.0", "units.1"], lambda: step(traced, x, "autocast" if way == "autocast" else "")
    )
    if any(trace.refused for trace in traces.values()):
        return "refused"
    columns = {name: random_column(trace, rng) for name, trace in traces.items()}
    programs = {
        name: ColumnProgram(traces[name], each, pack=packs(seed, rng.choice([0.0, 0.3, 1.0])))
        for name, each in columns.items()
    }
    expected = expected_of(lambda: step(plain, x, way))
    attached = attach(model, programs)
    # Unwritten memory is filled with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        found = expected_of(lambda: step(model, x, way))
    finally:
        torch.use_deterministic_algorithms(False)
    assert attached.counts.other == 0
    if isinstance(expected, str) or isinstance(found, str):
        kinds = [each if isinstance(each, str) else "ran" for each in (expected, found)]
        assert kinds[0] == kinds[1] or kinds[1].startswith("InvalidError"), kinds
        return "refused" if isinstance(expected, str) else "error"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        same = one.shape == other.shape and torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
        assert same, f"tensor {number} differs: seed {seed}, {way}"
    return "equal" if any(each.is_replayed for each in programs.values()) else "plain"


def expected_of(call: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | str:
    """The result of a step, or the name of an error that has a type for it."""
    try:
        return call()
    except InvalidError as error:
        return f"InvalidError: {error}"
    except RuntimeError as error:
        if "modified by an inplace" in str(error) or "unimplemented" in str(error) or "not implemented" in str(error):
            return str(error)
        raise


def run(seeds: range) -> None:
    outcomes = [check(seed, WAYS[seed % len(WAYS)]) for seed in seeds]
    assert outcomes.count("equal") > 0.8 * len(outcomes), outcomes
    assert outcomes.count("error") <= 0.02 * len(outcomes), outcomes


def test_random_modules() -> None:
    run(range(100))


@pytest.mark.long
def test_many_random_modules() -> None:
    run(range(1000, 1000 + MODULES))
