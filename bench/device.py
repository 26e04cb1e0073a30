"""Where the states of the bench are stored: in host memory, or on a GPU, which ranks may share."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

KINDS = ("cpu", "cuda")
VARIABLE = "HOLDFAST_BENCH_DEVICE"
"""Tells the ranks."""


def kind() -> str:
    """Return the device type of the states."""
    return os.environ.get(VARIABLE, KINDS[0])


def choose() -> None:
    """Select the GPU of this rank. Call it before anything is allocated on a GPU."""
    if kind() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def mesh() -> DeviceMesh:
    """Return the mesh of all ranks."""
    return init_device_mesh(kind(), (dist.get_world_size(),))


def settle() -> None:
    """Wait until the GPU has finished its queued work."""
    if kind() == "cuda":
        torch.cuda.synchronize()


def notes() -> list[str]:
    """Return remarks on the device for readers of the results."""
    return [f"states lay on {torch.cuda.get_device_name()}"] if kind() == "cuda" else []
