"""What ranks do in the tests of what is stored once: a frozen backbone under FSDP2, an adapter that is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from tests.support.gloo_worlds import World
from tests.support.small_networks import digest
from tests.support.tuning import tuned

SETTINGS = tuned(holdfast.Settings(chunk_bytes=4096), window_bytes=8192, unchanged_bytes_min=1024)
ROWS = 60
"""Cut evenly for two ranks and for three, so that every piece lies elsewhere on the other number of ranks."""


class Adapted(nn.Module):
    """A frozen backbone with a small adapter beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(ROWS, 600, bias=False), nn.Linear(600, ROWS, bias=False))
        self.adapter = nn.Sequential(nn.Linear(ROWS, 6, bias=False), nn.Linear(6, ROWS, bias=False))
        self.backbone.requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.backbone(batch) + self.adapter(batch)  # type: ignore[no-any-return]


class Training:
    """The adapter in training under FSDP2."""

    def __init__(self, seed: int) -> None:
        self.model = Adapted(seed)
        for layer in (*self.model.backbone, *self.model.adapter, self.model):
            fully_shard(layer)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(torch.ones(2, ROWS)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digests(self) -> dict[str, str]:
        """Digests of all parameters, whole; a collective."""
        found = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor)
            found[name] = digest(parameter.full_tensor())
        return found


def train_and_save(world: World, root: str, first: int, steps: int, resume: bool, lazily: bool) -> dict[str, object]:
    """Save after each step of training; return what was written, and what each step was saved with."""
    staging = "lazy" if lazily else "copy"
    settings = replace(SETTINGS, staging=staging)
    training = Training(1 if not resume else 2)
    said: dict[str, object] = {}
    with holdfast.CheckpointManager(Path(root), settings=settings) as manager:
        if resume:
            said["resumed"] = manager.load(training.state)
            said["loaded"] = training.digests()
        for step in range(first, first + steps):
            training.step()
            report = manager.save(step, training.state).wait()
            assert report is not None
            said[str(step)] = [report.bytes, report.unchanged_bytes, report.staging, training.digests()]
    return said


def load_each(world: World, root: str, steps: list[int]) -> dict[str, object]:
    """Load every step into a training made anew; return what came."""
    found: dict[str, object] = {}
    with holdfast.CheckpointManager(Path(root), settings=SETTINGS) as manager:
        for step in steps:
            training = Training(3)
            training.step()
            manager.load(training.state, step)
            found[str(step)] = training.digests()
    return found
