"""Where the states of the bench lie: in host memory, or on a GPU, which several ranks share where there is just one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

KINDS = ("cpu", "cuda")
VARIABLE = "HOLDFAST_BENCH_DEVICE"
"""Tells the ranks."""


def kind() -> str:
    """Return where states lie."""
    return os.environ.get(VARIABLE, KINDS[0])


def choose() -> None:
    """Make a GPU this rank's own, before anything is put there."""
    if kind() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def mesh() -> DeviceMesh:
    """Return the mesh of all ranks."""
    return init_device_mesh(kind(), (dist.get_world_size(),))


def settle() -> None:
    """Wait until the GPU has done what it was given."""
    if kind() == "cuda":
        torch.cuda.synchronize()


def notes() -> list[str]:
    """Return what a reader must know of it."""
    return [f"states lay on {torch.cuda.get_device_name()}"] if kind() == "cuda" else []
