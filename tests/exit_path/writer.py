"""One rank of a job that saves; run as a program, once per rank."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import Settings
from holdfast.base.geometry.dtype import DTYPES, NEWER_TYPES
from tests.support.tuning import tuned

RANKS = 2
STEP = 7
SHAPES = {
    "even": ((6, 8), Shard(0)),
    "uneven": ((5, 7), Shard(0)),
    "columns": ((5, 7), Shard(1)),
    "cube": ((3, 5, 4), Shard(1)),
    "one": ((1, 9), Shard(0)),
    "whole": ((9, 6), Replicate()),
    "line": ((11,), Shard(0)),
    "point": ((), Replicate()),
}
EMPTY = (4, 0, 3)
SETTINGS = tuned(Settings(chunk_bytes=4096), pack_header_bytes_max=16 * 1024)
"""So small that the state of every dtype takes several packs per rank."""


# The reader of PyTorch knows no F8_E8M0: `tests/reading/test_newer_types.py` opens such packs with safetensors.
STOCK = tuple(name for name, dtype in DTYPES.items() if dtype.safetensors and name not in NEWER_TYPES)
"""Element types that stock readers know; the others lie apart and are not theirs to read."""


def value_of(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that every process makes alike: all bits its dtype can have, NaNs among them."""
    random = np.random.default_rng(sum(map(ord, name + dtype)))
    count = int(np.prod(shape, dtype=int))
    if dtype == "bool":
        return torch.from_numpy(random.integers(0, 2, count).astype(bool).reshape(shape))
    raw = random.integers(0, 256, count * DTYPES[dtype].itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def expected_tensors() -> dict[str, torch.Tensor]:
    """What the checkpoint `layouts` holds, whole."""
    return {
        f"{dtype}.{name}": value_of(name, dtype, shape) for dtype in STOCK for name, (shape, _) in SHAPES.items()
    } | {"empty": torch.zeros(EMPTY)}


def sharded(tensor: torch.Tensor, mesh: dist.DeviceMesh, placement: Shard | Replicate) -> DTensor:
    """Distribute bits: gloo moves bytes of every type, but not tensors of every dtype."""
    chunks = [tensor]
    if isinstance(placement, Shard):
        chunks = list(
            torch.chunk(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, RANKS, placement.dim)
        )
        chunks = [chunk.view(tensor.dtype) for chunk in chunks]
        nothing = tensor.narrow(placement.dim, 0, 0)
        chunks += [nothing] * (RANKS - len(chunks))
    local = chunks[mesh.get_local_rank() if isinstance(placement, Shard) else 0].contiguous()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def save_layouts(folder: Path, mesh: dist.DeviceMesh) -> None:
    state: dict[str, dict[str, object]] = {}
    for dtype in STOCK:
        state[dtype] = {
            name: sharded(value_of(name, dtype, shape), mesh, placement) for name, (shape, placement) in SHAPES.items()
        }
    holdfast.save(folder / "layouts", {**state, "empty": torch.zeros(EMPTY)}, settings=SETTINGS)


def save_training(folder: Path, mesh: dist.DeviceMesh) -> None:
    """Two steps of FSDP2, under a manager, and beside it every tensor whole for comparison."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 7))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with holdfast.CheckpointManager(folder / "run", settings=SETTINGS) as manager:
        manager.save(STEP, {"model": model, "optimizer": optimizer, "epoch": 1}).wait()
    whole = {f"model.{fqn}": each.full_tensor() for fqn, each in model.named_parameters()}
    for fqn, parameter in model.named_parameters():
        for key, each in optimizer.state[parameter].items():
            tensor = each.full_tensor() if isinstance(each, DTensor) else each
            whole[f"optimizer.state.{fqn}.{key}"] = tensor.contiguous()
    if dist.get_rank() == 0:
        save_file(whole, folder / "whole.safetensors")


def save_lopsided(folder: Path, mesh: dist.DeviceMesh) -> None:
    """A checkpoint of which rank 1 holds nothing."""
    holdfast.save(folder / "lopsided", {"only": distribute_tensor(torch.ones(1, 5), mesh, [Shard(0)])})


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for save in (save_layouts, save_training, save_lopsided):
        save(folder, mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
