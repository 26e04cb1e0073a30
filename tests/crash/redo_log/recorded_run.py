"""A training with everything that a redo must follow, as a case of a world: killed at a step, or run to its end."""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.support.gloo_worlds import World


def network(layout: str, world_size: int) -> tuple[nn.Module, nn.Module]:
    """Return a network and the module that trains it, alike on every rank."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(33) if layout == "ddp" else nn.LayerNorm(33)
    model = nn.Sequential(nn.Linear(16, 33), norm, nn.GELU(), nn.Dropout(0.1), nn.Linear(33, 5))
    match layout:
        case "ddp" if world_size > 1:
            return model, DistributedDataParallel(model)
        case "fsdp":
            _shard(model, init_device_mesh("cpu", (world_size,)))
        case "hsdp":
            _shard(model, init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
        case "tp" | "fsdp-tp":
            mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
            # Rows that two ranks share evenly; and no norm, which would need inputs that are DTensors.
            model[0], model[1], model[4] = nn.Linear(16, 34), nn.Identity(), nn.Linear(34, 5)
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "4": RowwiseParallel()})
            if layout == "fsdp-tp":
                _shard(model, mesh["dp"])
        case "pp":
            stages = (("0", "1", "2", "3"), ("4",))
            for name in stages[1 - torch.distributed.get_rank()]:
                del model._modules[name]
        case "8bit":
            # Of 4096 elements: torchao quantises the optimizer state of no smaller tensor.
            model[0], model[1], model[4] = nn.Linear(16, 256), nn.LayerNorm(256), nn.Linear(256, 5)
    return model, model


def _shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    for part in (*model, model):
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)


def _backward(layout: str, replica: nn.Module) -> None:
    """Carry out forward and backward of a batch."""
    batch = torch.randn(6, 16)
    if layout != "pp":
        replica(batch).square().mean().backward()
    elif torch.distributed.get_rank() == 0:
        out = replica(batch)
        torch.distributed.send(out.detach(), 1)
        gradient = torch.empty_like(out)
        torch.distributed.recv(gradient, 1)
        out.backward(gradient)
    else:
        between = torch.empty(6, 33)
        torch.distributed.recv(between, 0)
        replica(between.requires_grad_()).square().mean().backward()
        assert between.grad is not None
        torch.distributed.send(between.grad, 0)


def _optimizer_class(layout: str) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit if layout == "8bit" else torch.optim.AdamW


def train(
    world: World,
    root: str,
    layout: str = "ddp",
    steps: int = 40,
    kill_at: int | None = None,
    kill_rank: int | None = None,
    kill_after: float | None = None,
    every: int = 15,
    pause: float = 0.0,
    differential: bool = True,
) -> dict[str, object]:
    """Train; return where the run began and the digest of everything at its end.

    Args:
        world: The ranks.
        root: The root of the run.
        layout: `ddp`, also for one process, or another one of `network`.
        steps: The last step.
        kill_at: The step after which ranks kill themselves; None for none.
        kill_rank: The one rank that kills itself; None for all.
        kill_after: Seconds after the first recoverable step at which this rank kills itself.
        every: Steps between bases.
        pause: Seconds of each step.
        differential: Whether steps are logged.
    """
    model, replica = network(layout, world.size)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    kind = _optimizer_class(layout)
    optimizer = kind([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": holdfast.RngState()}
    # The ranks that share one layer have the same batches.
    torch.manual_seed(100 + (world.rank // 2 if layout in ("tp", "fsdp-tp") else world.rank))
    random.seed(100 + world.rank)
    settings = holdfast.Settings(collect_grace_seconds=0)  # The end of a run waits for the grace.
    options = holdfast.Differential(optimizers=(kind,)) if layout == "8bit" else differential
    with holdfast.CheckpointManager(root, every=every, keep_last=2, differential=options, settings=settings) as manager:
        start = manager.load(state) or 0
        report = manager.load_report
        for step in range(start + 1, steps + 1):
            time.sleep(pause)
            for _ in range(2):
                _backward(layout, replica)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            manager.maybe_save(step, state)
            recoverable = manager.recoverable if differential else None
            note_step(world, step, recoverable)
            if kill_after is not None and recoverable is not None:
                threading.Timer(kill_after, kill).start()
                kill_after = None
            if step == kill_at and kill_rank in (None, world.rank):
                wait_for_seal(manager, step)
                kill()
        return {
            "start": start,
            "base": None if report is None else report.base_step,
            "redone": None if report is None else report.redone_steps,
            "why": "" if report is None else report.why_not_further,
            "digest": digest_of(model, optimizer, schedule),
        }


def note_step(world: World, step: int, recoverable: int | None) -> None:
    """Leave the last step of this rank, for the judge of a killed run."""
    with Path(world.scratch / f"step.{world.rank}").open("a") as file:
        file.write(f"{step} {recoverable}\n")


def wait_for_seal(manager: holdfast.CheckpointManager, step: int) -> None:
    """Wait until a step is sealed on this rank."""
    deadline = time.monotonic() + 20
    while manager.recoverable != step:
        assert time.monotonic() < deadline, f"step {step} was never sealed: {manager.recoverable}"
        time.sleep(0.005)


def kill() -> None:
    """Kill this rank as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: object) -> str:
    """Return the digest of every bit of the state on this rank, random numbers included."""
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(name.encode() + _bytes_of(tensor))
    for parameter in model.parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            state.update(key.encode() + _bytes_of(value))
    state.update(repr([{**group, "params": 0} for group in optimizer.param_groups]).encode())
    state.update(repr(schedule.state_dict()).encode())  # type: ignore[attr-defined]
    state.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    return state.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if type(local) is not torch.Tensor:
        names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
        return b"".join(_bytes_of(getattr(local, name)) for name in names)
    return local.contiguous().numpy().tobytes()
