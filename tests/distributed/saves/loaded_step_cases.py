"""What ranks do in the tests of a save at the step that was just loaded, under DDP and under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.support.gloo_worlds import World
from tests.support.small_networks import NormNet
from tests.support.tuning import tuned

SETTINGS = tuned(holdfast.Settings(chunk_bytes=4096), window_bytes=8192)
BATCH = torch.linspace(-1, 1, 24).reshape(6, 4)


class Training:
    """A model in training, with an optimizer whose step moves no version counter."""

    def __init__(self, seed: int, layout: str) -> None:
        torch.manual_seed(seed)
        self.net = NormNet()
        if layout == "fsdp2":
            fully_shard(self.net.first)
            fully_shard(self.net)
        if layout == "fsdp1":
            self.net = FullyShardedDataParallel(self.net, use_orig_params=True, device_id=torch.device("cpu"))
        self.model: nn.Module = DistributedDataParallel(self.net) if layout == "ddp" else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, fused=True)
        self.own = holdfast.PerRank(torch.full((5,), float(dist.get_rank())))
        self.seen = 0

    @property
    def state(self) -> dict[str, object]:
        own = {"own": self.own, "rng": holdfast.RngState()}
        return {"model": self.model, "optimizer": self.optimizer, "seen": self.seen, **own}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.train()(BATCH).square().sum().backward()
        self.optimizer.step()
        self.seen += 1


def nothing(training: Training) -> None:
    """Change nothing."""


def write_data(training: Training) -> None:
    """Write past the version counter of what this rank holds of one parameter."""
    weight = training.net.first.weight
    (weight.to_local() if isinstance(weight, DTensor) else weight).data.add_(1)


def write_average(training: Training) -> None:
    """Write past the version counter of one tensor of the optimizer."""
    average = training.optimizer.state[training.net.first.weight]["exp_avg"]
    (average.to_local() if isinstance(average, DTensor) else average).data.add_(1)


def write_own(training: Training) -> None:
    """Write to a tensor that each rank has for itself."""
    assert isinstance(training.own.value, torch.Tensor)
    training.own.value.data.add_(1)


def step_fused(training: Training) -> None:
    """Let the optimizer take a step; it needs no other rank."""
    for parameter in training.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    training.optimizer.zero_grad()


def set_rate(training: Training) -> None:
    """Change a hyperparameter."""
    training.optimizer.param_groups[0]["lr"] = 0.2


def count(training: Training) -> None:
    """Change a plain value."""
    training.seen += 1


def evaluate(training: Training) -> None:
    """Look at the model as an evaluation does, and draw a number; every rank."""
    with torch.no_grad():
        training.model.eval()(BATCH).sum()
    torch.randn(3)


CHANGES: dict[str, Callable[[Training], None]] = {
    each.__name__: each
    for each in (nothing, write_data, write_average, write_own, step_fused, set_rate, count, evaluate)
}


def save_what_was_loaded(world: World, root: str, layout: str, changes: list[tuple[str, list[int]]]) -> list[object]:
    """Load a step, change something on some ranks, and save at the same step, again and again; then train on.

    Returns:
        What came of each save: step and bytes, or the error.
    """
    first = Training(1, layout)
    first.step()
    with holdfast.CheckpointManager(Path(root), settings=SETTINGS) as manager:
        manager.save(10, first.state).wait()
    training = Training(2, layout)
    training.step()
    said: list[object] = []
    with holdfast.CheckpointManager(Path(root), settings=SETTINGS) as manager:
        for number, (change, ranks) in enumerate(changes):
            assert manager.load(training.state) == 10
            seen = training.seen
            if world.rank in ranks:
                CHANGES[change](training)
            try:
                report = manager.save(10, training.state, tags=[f"change-{number}"]).wait()
                assert report is not None
                said.append([report.step, report.bytes])
            except holdfast.CheckpointError as error:
                said.append([type(error).__name__, str(error)])
            training.seen = seen
        manager.load(training.state)
        training.step()
        report = manager.save(11, training.state).wait()
        assert report is not None and report.bytes > 0
        assert manager.steps() == [10, 11]
    dist.barrier()
    return said
