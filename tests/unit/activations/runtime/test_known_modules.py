"""Modules of torch under random columns: attention, recurrence, convolutions, norms with buffers, parametrizations."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from holdfast.activations.runtime.attach import attach, trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from tests.unit.activations.runtime.random_units import packs, random_column

WIDTH, COLUMNS, STEPS = 16, 5, 2


class Residual(nn.Module):
    """Convolutions with batch norms, dropout of channels and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(3)])
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout2d(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.dropout(self.relu(self.norms[0](self.first(x))))
        return self.relu(self.norms[1](self.second(made)) + x)


class Rotated(nn.Module):
    """Complex numbers: views of another type on one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.outer(torch.arange(6.0), torch.arange(8.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.view_as_complex(self.inner(x).unflatten(-1, (8, 2)).contiguous())
        return torch.view_as_real(numbers * torch.polar(torch.ones_like(self.angles), self.angles)).flatten(-2) + x


ROWS, IMAGE = torch.randn(4, 6, WIDTH), torch.randn(2, 3, 8, 8)
MODULES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True), ROWS),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2), ROWS),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), ROWS),
    "residual": (Residual, IMAGE),
    "residual-eval": (lambda: Residual().eval(), IMAGE),
    "residual-channels-last": (Residual, IMAGE.to(memory_format=torch.channels_last)),
    "weight-norm": (lambda: nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU(), nn.Softmax(-1)), ROWS),
    "spectral-norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.SiLU()), ROWS),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm1d(6, track_running_stats=True)), ROWS),
    "glu": (lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.GLU(), nn.Hardswish(inplace=True), nn.Mish()), ROWS),
    "complex": (Rotated, ROWS),
}


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    output = model[0](x)
    loss = (output[0] if isinstance(output, tuple) else output).square().mean()
    model.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), x.grad, *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("name", MODULES)
def test_gradients_and_buffers_equal_those_of_the_plain_module(name: str) -> None:
    make, x = MODULES[name]
    plain = nn.ModuleList([make()])
    traced = deepcopy(plain)
    trace = trace_units(traced, ["0"], lambda: step(traced, x))["0"]
    assert not trace.why_not
    replayed = 0
    for seed in range(COLUMNS):
        model, expected = deepcopy(plain), deepcopy(plain)
        program = ColumnProgram(trace, random_column(trace, random.Random(seed)), pack=packs(seed, 0.2))
        replayed += program.is_replayed
        attach(model, {"0": program})
        for _ in range(STEPS):
            for mine, theirs in zip(step(model, x), step(expected, x), strict=True):
                assert mine is theirs is None or torch.equal(mine, theirs)
    assert replayed > 0
