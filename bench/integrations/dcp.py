"""DCP's own storage beside ours: how long `async_save` blocks, and a durable `save`; ours beside `holdfast.save`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from bench.integrations.common import seconds, state_bytes, sync_tree
from holdfast.integrations import dcp

KEYS = {
    "dcp_stall": ("own_stall", "ours_stall"),
    "dcp_save": ("own", "ours"),
    "integration_overhead": ("ours", "plain"),
}
"""What stands in each ratio."""

_TENSORS = 16


@cache
def state() -> dict[str, Any]:
    """Sharded tensors, and a few values: made once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = state_bytes() // _TENSORS // 4 // 1024
    torch.manual_seed(dist.get_rank())
    tensors = {
        f"layers.{number}.weight": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)], run_check=False)
        for number in range(_TENSORS)
    }
    return {"model": tensors, "step": 1}


def round(place: Path, number: int) -> dict[str, float]:
    """Return the seconds of each on this rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: dict[str, float] = {}
    ways = [_own, _own_unsynced, _own_stall, _ours, _ours_stall, _plain]
    # In another order each round: none is always the first.
    for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
        path = place / f"{number}-{way.__name__[1:]}"
        dist.barrier()
        found[way.__name__[1:]] = way(path)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
    return found


def _own(path: Path) -> float:
    def save() -> None:
        torch_dcp.save(state(), storage_writer=torch_dcp.FileSystemWriter(path, sync_files=True))
        sync_tree(path)

    return seconds(save)


def _own_unsynced(path: Path) -> float:
    return seconds(lambda: torch_dcp.save(state(), storage_writer=torch_dcp.FileSystemWriter(path, sync_files=False)))


def _own_stall(path: Path) -> float:
    return _stall(lambda: torch_dcp.async_save(state(), checkpoint_id=path))


def _ours(path: Path) -> float:
    return seconds(lambda: torch_dcp.save(state(), storage_writer=dcp.HoldfastWriter(path)))


def _ours_stall(path: Path) -> float:
    return _stall(lambda: torch_dcp.async_save(state(), storage_writer=dcp.HoldfastWriter(path)))


def _plain(path: Path) -> float:
    return seconds(lambda: holdfast.save(path, state()))


def _stall(begin: Callable[[], Any]) -> float:
    """Return how long a call blocks; the save ends outside the time."""
    began: list[Any] = []
    blocked = seconds(lambda: began.append(begin()))
    began[0].result()
    return blocked
