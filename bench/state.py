"""States that the bench saves and loads."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

MIB = 1 << 20


def sharded_state(mesh: DeviceMesh, total_bytes: int, fill: bool) -> dict[str, torch.Tensor]:
    """Return fp32 DTensors of 16 MiB, each row-sharded over the mesh."""
    count = max(total_bytes // (16 * MIB), 1)
    generator = torch.Generator().manual_seed(7)
    state = {}
    for number in range(count):
        whole = torch.rand(4096, 1024, generator=generator) if fill else torch.zeros(4096, 1024)
        state[f"layers.{number}.weight"] = distribute_tensor(whole, mesh, [Shard(0)])
    return state


def tiny_state(count: int, fill: bool) -> dict[str, torch.Tensor]:
    """Return plain tensors of 16 bytes."""
    return {f"group.{n // 100}.tensor.{n}": torch.full((4,), float(n) if fill else 0.0) for n in range(count)}
