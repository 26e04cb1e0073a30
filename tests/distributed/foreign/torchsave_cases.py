"""One file of torch.save, loaded by ranks that each hold a part."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from tests.support.gloo_worlds import World


def plain(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has stepped, the same on every rank."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one step on the same data everywhere."""
    optimizer.zero_grad()
    model(torch.arange(24.0).reshape(4, 6) / 24).square().sum().backward()
    optimizer.step()


def load_sharded(world: World, path: str) -> dict[str, object]:
    """Shard a fresh model, load the whole state of one file into it, and compare every tensor whole."""
    model, _ = plain(9)
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3.0)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    report = holdfast.load(Path(path), state)
    expected_model, expected = plain(1)
    step(expected_model, expected)
    same = [
        torch.equal(_whole(mine), theirs)
        for mine, theirs in zip(model.parameters(), expected_model.parameters(), strict=True)
    ]
    for mine, theirs in zip(optimizer.state.values(), expected.state.values(), strict=True):
        same += [torch.equal(_whole(mine[key]), theirs[key]) for key in theirs]
    return {
        "same": all(same),
        "compared": len(same),
        "lr": optimizer.param_groups[0]["lr"],
        "epoch": state["epoch"],
        "missing": list(report.missing),
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
