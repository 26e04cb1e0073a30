"""Cases of torchao under FSDP2; `test_torchao_sharded.py` runs them."""

from __future__ import annotations

from typing import Any

import torch
import torchao.optim
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from tests.support.gloo_worlds import World

WIDTH = 128
KINDS = {"8bit": torchao.optim.AdamW8bit, "4bit": torchao.optim.AdamW4bit, "fp8": torchao.optim.AdamWFp8}


def training(kind: str, *, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    if sharded:
        fully_shard(model)
    return {"model": model, "optimizer": KINDS[kind](model.parameters(), lr=1e-3)}


def train(state: dict[str, Any], steps: int) -> float:
    """Train on the same batch on every rank; return the last loss."""
    loss = torch.zeros(())
    with torch.compiler.set_stance("force_eager"):
        for _ in range(steps):
            state["optimizer"].zero_grad()
            loss = (state["model"](torch.ones(2, WIDTH)) - 0.5).square().mean()
            loss.backward()
            state["optimizer"].step()
    return loss.item()


def moments(state: dict[str, Any]) -> list[float]:
    """Return the sum of every dequantised moment over all ranks, in double precision."""
    sums = []
    for kept in state["optimizer"].state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            tensor = kept[key]
            if isinstance(tensor, DTensor):
                local = tensor.to_local()
                local = local.dequantize() if hasattr(local, "dequantize") else local
                mesh, placements = tensor.device_mesh, tensor.placements
                tensor = DTensor.from_local(local.float(), mesh, placements, run_check=False).full_tensor()
            elif hasattr(tensor, "codes"):
                tensor = tensor.dequantize()
            sums.append(tensor.double().sum().item())
    return sums


def save(world: World, path: str, kind: str) -> dict[str, Any]:
    state = training(kind, sharded=True)
    train(state, 3)
    holdfast.save(path, state)
    kept = moments(state)
    return {"moments": kept, "loss": train(state, 2)}


def resume(world: World, path: str, kind: str) -> dict[str, Any]:
    state = training(kind, sharded=True)
    holdfast.load(path, state)
    kept = moments(state)
    return {"moments": kept, "loss": train(state, 2)}
