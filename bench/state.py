"""The states that the bench saves and loads. Each rank makes its own part."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

MIB = 1 << 20
ROWS, COLUMNS = 4096, 1024


def sharded_state(mesh: DeviceMesh, total_bytes: int, fill: bool) -> dict[str, torch.Tensor]:
    """Return fp32 DTensors of 16 MiB, each row-sharded over the mesh. Every page of them has been written."""
    assert ROWS % mesh.size() == 0, "shares of one size, so that every rank moves as much"
    share = (ROWS // mesh.size(), COLUMNS)
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    state: dict[str, torch.Tensor] = {}
    for number in range(max(total_bytes // (16 * MIB), 1)):
        own = torch.rand(share, generator=generator) if fill else torch.zeros(share).fill_(0.0)
        own = own.to(mesh.device_type)
        state[f"layers.{number}.weight"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return state


def tiny_state(count: int, fill: bool, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Return tensors of 16 bytes: plain ones, or DTensors sharded over a mesh."""
    state: dict[str, torch.Tensor] = {}
    for n in range(count):
        tensor = torch.full((4,), float(n) if fill else 0.0)
        if mesh is not None:
            own = tensor.tensor_split(mesh.size())[mesh.get_local_rank()].clone()
            tensor = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        state[f"group.{n // 100}.tensor.{n}"] = tensor
    return state
