"""Kinds of training that people have: each is built, trained, saved, built anew, loaded and trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast


def batch(number: int, width: int = 8) -> torch.Tensor:
    """Return the input of one step."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(number))


@dataclass
class Training:
    """A training: what is saved of it, and its step."""

    state: dict[str, Any]
    """What is passed to `save` and `load`."""

    step: Callable[[int], float]
    """Trains on one batch; returns a number that depends on all state."""

    loaded: Callable[[], None] = field(default=lambda: None)
    """What people do after the load, with what it put into `state`."""


Build = Callable[[], Training]


def network(seed: int = 0, width: int = 8) -> nn.Sequential:
    """Return a small network with running statistics."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, width))


def supervised(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 8, **more: Any) -> Training:
    """Return the training of a model that copies its input."""

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (model(batch(number, width)) - batch(number, width)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training({"model": model, "optimizer": optimizer, **more}, step)


def resume(folder: Path, build: Build, steps: int = 3) -> None:
    """Require that a resumed training gives the losses of the uninterrupted one, bit for bit."""
    training = build()
    for number in range(steps):
        training.step(number)
    holdfast.save(folder / "c", training.state, process_group=False)
    expected = [training.step(number) for number in range(steps, 2 * steps)]
    again = build()
    holdfast.load(folder / "c", again.state, process_group=False)
    again.loaded()
    assert [again.step(number) for number in range(steps, 2 * steps)] == expected
