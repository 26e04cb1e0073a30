"""What ranks do in the tests of containers in a state: optimizers in a list, values that cannot be saved."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.distributed.launch import World

INPUTS = torch.linspace(-1, 1, 24).reshape(4, 6)


class Trained:
    """A model, sharded or not, with an optimizer for its matrices and one for the rest."""

    def __init__(self, seed: int, shards: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        if shards > 1:
            fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (shards,)))
        matrices = [each for each in self.model.parameters() if each.ndim == 2]
        others = [each for each in self.model.parameters() if each.ndim != 2]
        self.optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
        self.schedulers = tuple(torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in self.optimizers)

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizers": self.optimizers, "schedulers": self.schedulers}

    def steps(self, count: int) -> list[float]:
        """Train on the same inputs on every rank; return the losses."""
        losses = []
        for _ in range(count):
            self.model.zero_grad()  # Before the forward: after it, FSDP2 may show whole parameters.
            loss = (self.model(INPUTS) - INPUTS).square().mean()
            loss.backward()
            for each in (*self.optimizers, *self.schedulers):
                each.step()
            losses.append(loss.item())
        return losses


def optimizers_in_a_list(world: World, path: str) -> list[float]:
    """Train under FSDP2, save, load into another job, and return the losses of training on in both."""
    run, other = Trained(0, world.size), Trained(1, world.size)
    run.steps(3)
    holdfast.save(path, run.state())
    holdfast.load(path, other.state())
    losses = run.steps(3)
    again = other.steps(3)
    assert again == losses, (again, losses)
    return losses


def refused_on_one_rank(world: World, path: str) -> str:
    """One rank has values that cannot be saved; return what is raised."""
    state: dict[str, object] = {"w": torch.ones(3)}
    if world.rank == 1:
        state |= {"args": argparse.Namespace(lr=0.1), "cfg": [{"device": object()}], "mask": torch.eye(3).to_sparse()}
    try:
        holdfast.save(path, state)
    except holdfast.InvalidError as error:
        return str(error)
    return "saved"


def names_of_each_rank(world: World, path: str) -> None:
    """Save modules of which every rank has its own, beside one that all have, as under a pipeline."""
    own = {f"{world.rank}.{name}": torch.ones(2) for name in ("z", "a", "m")}
    holdfast.save(path, {"shared": torch.ones(1), "stages": {"norm": torch.zeros(3), **own}, "step": 3})
