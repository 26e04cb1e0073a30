"""What ranks do in the tests of health: train alike, damage one copy or one share, save, say what they were told."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.settings import Settings
from tests.support.gloo_worlds import World
from tests.support.resumed_run import goes_on
from tests.support.tuning import tuned

FORGETFUL = tuned(Settings(), sample_whole_bytes=0, sample_blocks=2, sample_block_bytes=4)
"""Looks at two elements of a tensor, so it misses one of 500,000."""
WATCHFUL = replace(FORGETFUL, count_nonfinite=True, compare_replicas=True)


class Heard(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    # Large enough that samples are a small part of it.
    return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512, bias=False))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    model(torch.randn(4, 512, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip_one_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of one element."""
    bits = tensor.detach().reshape(-1).view(torch.int32)
    bits[bits.numel() // 3] ^= 1


def save(root: str, step: int, state: dict[str, object], settings: Settings = WATCHFUL) -> dict[str, object]:
    """Save a step; return what the report, the log and the manifest say."""
    heard = Heard()
    logger = logging.getLogger("holdfast")
    logger.addHandler(heard)
    try:
        with holdfast.CheckpointManager(root, settings=settings) as manager:
            report = goes_on(manager).save(step, state).wait()
    finally:
        logger.removeHandler(heard)
    assert report is not None
    health = holdfast.open_checkpoint(Path(root) / f"step-{step:012d}").manifest.health
    return {
        "unhealthy": list(report.unhealthy),
        "warned": [said for said in heard.said if "unhealthy" in said],
        "nonfinite": None if health is None or health.nonfinite is None else dict(health.nonfinite),
        "divergent": None if health is None or health.divergent is None else
        {fqn: list(ranks) for fqn, ranks in health.divergent.items()},
        "undecided": [] if health is None else list(health.undecided),
        "hosts": [] if health is None else sorted(health.hosts),
    }  # fmt: skip


def replicated(world: World, root: str, damaged_rank: int, settings: str = "watchful") -> list[dict[str, object]]:
    """Train under DDP; flip a bit of a weight on one rank and of optimizer state on it too; save before and after."""
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    train(parallel, optimizer, world.rank)
    state: dict[str, object] = {"model": parallel, "optimizer": optimizer}
    chosen = WATCHFUL if settings == "watchful" else FORGETFUL
    said = [save(root, 1, state, chosen)]
    if world.rank == damaged_rank:
        flip_one_bit(model[1].weight)  # type: ignore[arg-type]
        flip_one_bit(optimizer.state[model[0].weight]["exp_avg"])  # type: ignore[index]
    said.append(save(root, 2, state, chosen))
    return said


def hybrid(world: World, root: str, replicas: int, damaged_rank: int) -> list[dict[str, object]]:
    """The same under HSDP: what is damaged is the part of a weight that one rank holds."""
    model = network()
    mesh = dist.init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, world.rank)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    said = [save(root, 1, state)]
    if world.rank == damaged_rank:
        flip_one_bit(model[1].weight.to_local())  # type: ignore[operator]
    said.append(save(root, 2, state))
    return said


def nonfinite(world: World, root: str) -> list[dict[str, object]]:
    """Under FSDP2: NaN in the share of every rank, then mended; a mask of -inf is there from the first."""
    model = network()
    model.register_buffer("mask", torch.full((7,), float("-inf")))
    mesh = dist.init_device_mesh("cpu", (world.size,))
    fully_shard(model, mesh=mesh)
    state: dict[str, object] = {"model": model}
    weight = model[1].weight.to_local()  # type: ignore[operator]
    said = [save(root, 1, state)]
    with torch.no_grad():
        kept = weight[0, : 1 + world.rank].clone()
        weight[0, : 1 + world.rank] = float("nan")
    said += [save(root, 2, state)]
    # A manager made anew that has loaded knows what the step before had.
    with holdfast.CheckpointManager(root, settings=WATCHFUL) as manager:
        assert manager.load(state) == 2
        again = manager.save(3, state).wait()
        with torch.no_grad():
            weight[0, : 1 + world.rank] = kept
        mended = manager.save(4, state).wait()
    assert again is not None and mended is not None
    return [*said, {"again": list(again.unhealthy), "mended": list(mended.unhealthy)}]
