"""Training under random columns that change, beside plain training: what each step leaves has the same bits."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator

import torch
from torch import nn

from holdfast.activations.runtime.attach import AttachedUnits, attach, trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from holdfast.activations.runtime.traced import UnitTrace
from tests.unit.activations.runtime.random_units import packs, random_column

WIDTH, UNITS, ROWS = 32, 3, 64
NAMES = [f"units.{number}" for number in range(UNITS)]

STEPS = int(os.environ.get("PARITY_STEPS", 20))
"""Steps of a training."""

EVERY = 10
"""Steps between two draws of columns."""

ACCUMULATED = 4
"""Backwards of a step whose way says so."""


class Unit(nn.Module):
    """A feed-forward layer with a batch norm, whose buffers each forward changes, and dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.LayerNorm(WIDTH), nn.BatchNorm1d(4 * WIDTH, affine=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self.first(nn.functional.gelu(self.seen(self.up(self.norm(rows)))))
        return rows + self.second(self.down(inner)).to(rows.dtype)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.before(rows)
        for unit in self.units:
            rows = unit(rows)
        out: torch.Tensor = self.after(rows)
        return out


Made = tuple[nn.Module, nn.Module]
"""What a training calls, and the module whose parameters it steps."""


def digests(make: Callable[[], Made], way: str, *, is_planned: bool, rank: int = 0) -> list[str]:
    """Return the digests of all state after each step of a training."""
    return list(_training(make, way, is_planned=is_planned, rank=rank))


def _training(make: Callable[[], Made], way: str, *, is_planned: bool, rank: int) -> Iterator[str]:
    traces = _traces(make, way, rank) if is_planned else {}
    called, model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    attached = AttachedUnits([])
    for number in range(STEPS):
        if is_planned and number % EVERY == 0:
            attached.detach()
            attached = attach(model, _programs(traces, 100 * number + rank))
        _step(called, way, number, rank)
        optimizer.step()
        yield _digest(model, optimizer)
        optimizer.zero_grad()
    assert attached.counts.other == 0


def _traces(make: Callable[[], Made], way: str, rank: int) -> dict[str, UnitTrace]:
    called, model = make()
    traces = trace_units(model, NAMES, lambda: _step(called, way, 0, rank))
    assert not any(trace.why_not or trace.refused for trace in traces.values())
    return traces


def _programs(traces: dict[str, UnitTrace], seed: int) -> dict[str, ColumnProgram]:
    rng = random.Random(seed)
    return {
        name: ColumnProgram(trace, random_column(trace, rng), pack=packs(seed, 0.2)) for name, trace in traces.items()
    }


def _step(called: nn.Module, way: str, number: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    for _ in range(ACCUMULATED if way.endswith("accumulated") else 1):
        rows = torch.randn(ROWS, 8, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=way.endswith("autocast")):
            output = called(rows)
        (output.float() - rows.sum(1, keepdim=True)).square().mean().backward()


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of parameters, gradients, buffers, the state of the optimizer and the generator."""
    moments = (each for parameter in model.parameters() for each in optimizer.state[parameter].values())
    gradients = (each.grad for each in model.parameters())
    digest = hashlib.sha256()
    for each in (*model.parameters(), *gradients, *model.buffers(), *moments, torch.get_rng_state()):
        local = each.to_local() if hasattr(each, "to_local") else each  # type: ignore[operator, union-attr]
        digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
