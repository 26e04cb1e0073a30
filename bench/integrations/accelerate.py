"""Saves under Accelerate and FSDP2: its own `save_state`, ours, and `holdfast.save` of the same state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist

import holdfast
from bench.integrations.common import seconds, state_bytes, sync_tree
from holdfast.integrations.accelerate import Accelerator
from tests.integrations.accelerate.on_cpu import shard, sharding_plugin

KEYS = {"accelerate_save": ("own", "ours"), "integration_overhead": ("ours", "plain")}

WIDTH = 1024
BYTES_PER_PARAMETER = 12
"""Of a parameter in 32 bits and its two moments."""


@dataclass(frozen=True)
class _Job:
    """What is saved, and two Accelerators that hold it."""

    own: accelerate.Accelerator
    ours: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


@cache
def _job() -> _Job:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plugin = sharding_plugin("Linear")
    own, ours = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin), Accelerator(cpu=True, fsdp_plugin=plugin)
    shard(own, plugin)
    layers = max(1, own.num_processes * state_bytes() // (BYTES_PER_PARAMETER * WIDTH**2))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    model, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters()))
    own.backward(model(torch.randn(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    # Both save the very same objects.
    ours._models, ours._optimizers = own._models, own._optimizers
    return _Job(own, ours, model, optimizer)


def round(place: Path, number: int) -> dict[str, float]:
    """Return the seconds of one round on this rank; the order turns from round to round."""
    job = _job()
    saves: dict[str, Callable[[Path], dict[str, float]]] = {
        "own": lambda folder: _own(job, folder),
        "ours": lambda folder: {"ours": seconds(lambda: job.ours.save_state(folder))},
        "plain": lambda folder: {"plain": seconds(lambda: holdfast.save(folder, _state(job)))},
    }
    names = list(saves)
    turned = names[number % len(names) :] + names[: number % len(names)]
    times: dict[str, float] = {}
    for name in turned:
        folder = place / f"{name}-{number}"
        dist.barrier()
        times |= saves[name](folder)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    return times


def _own(job: _Job, folder: Path) -> dict[str, float]:
    unsynced = seconds(lambda: (job.own.save_state(str(folder)), dist.barrier()))
    # One rank makes the files of both durable: they are on one machine.
    synced = seconds(lambda: (sync_tree(folder) if dist.get_rank() == 0 else None, dist.barrier()))
    return {"own": unsynced + synced, "own_unsynced": unsynced}


def _state(job: _Job) -> dict[str, object]:
    return {"model": job.model, "optimizer": job.optimizer, "rng": holdfast.RngState()}
