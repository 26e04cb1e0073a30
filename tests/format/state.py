"""The states that the golden checkpoints hold, rebuilt for each load with other values in them."""

from __future__ import annotations

import datetime
import math
from pathlib import PurePosixPath

import numpy as np
import torch
from torch import nn

from holdfast.base.geometry.dtype import DTYPES, NEWER_TYPES

State = dict[str, object]


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a convolution, a buffer and a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))


def filled(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a tensor of the same shape and dtype with bytes that depend on the seed alone."""
    count = tensor.numel()
    if tensor.dtype == torch.bool:
        return (torch.arange(count) * 7 + seed).remainder(3).eq(0).reshape(tensor.shape)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        numbers = ((torch.arange(count) * 37 + seed * 101) % 251 - 125).to(torch.float32) / 16
        return numbers.to(tensor.dtype).reshape(tensor.shape)
    return ((torch.arange(count) * 13 + seed) % 97).to(tensor.dtype).reshape(tensor.shape)


def fill(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
            tensor.copy_(filled(tensor, seed + number))


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Let an optimizer step, then fill its state with what no arithmetic of a processor changes."""
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for number, state in enumerate(optimizer.state.values()):
        for offset, name in enumerate(("exp_avg", "exp_avg_sq")):
            state[name].copy_(filled(state[name], seed + 50 + 2 * number + offset))
    fill(module, seed)


def values(seed: int) -> State:
    """Return one value of every kind of the closed set."""
    return {
        "none": None,
        "flags": [True, False],
        "integers": [0, -1, 1 << 62, -(10**40), seed],
        "floats": [0.1 + seed, -0.0, math.inf, -math.inf, math.nan, 5e-324],
        "text": 'Gewichte ✓ \n\0 "{}"',
        "bytes": bytes(range(0, 256, 17)),
        "tuple": (1, ("two", [3.0])),
        "set": {1, 2, 3},
        "frozenset": frozenset({"a"}),
        "keys": {1: "int", None: "none", False: "bool", (1, "a"): "tuple", "s": "str"},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3) + seed,
        "number": np.float32(1.5),
        "when": datetime.datetime(2026, 11, 21, 9, 30, 15, 123456, tzinfo=datetime.UTC),
        "path": PurePosixPath("data/shard-7.bin"),
        "dtype": torch.bfloat16,
        "size": torch.Size([3, 4]),
        "device": torch.device("cpu"),
    }


def training(seed: int) -> State:
    """Return module, optimizer of two groups, scheduler, values, and a tensor of every dtype."""
    model = Tied()
    fill(model, seed)
    groups = [
        {"params": [model.embedding.weight, model.conv.weight], "lr": 0.01 + seed / 64, "weight_decay": 0.1},
        {"params": [*model.norm.parameters(), model.head.bias, model.scale], "lr": 0.02, "betas": (0.5, 0.75)},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    stepped(model, optimizer, seed)
    for _ in range(seed % 5):
        scheduler.step()
    fill(model, seed)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "values": values(seed),
        "dtypes": {
            name: filled(torch.zeros(3, 5, dtype=getattr(torch, name)), seed)
            for name in DTYPES
            if name not in NEWER_TYPES
        },
        "empty": torch.zeros(0, 4),
        "large": filled(torch.zeros(9, 700), seed),
    }


class Uneven(nn.Module):
    """Layers whose first dimension two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 7)
        self.second = nn.Linear(7, 5)


def plain_sharded_state(seed: int) -> State:
    """Return what the sharded checkpoint holds, on one process."""
    model = Uneven()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepped(model, optimizer, seed)
    return {"model": model, "optimizer": optimizer, "seen": {"step": seed}}


def single(seed: int) -> State:
    """Return what the checkpoint saved by path holds: nothing but tensors and values."""
    return {"weights": {"a.b": filled(torch.zeros(4, 4), seed), "c": filled(torch.zeros(3), seed)}, "note": "by path"}


class Masked(nn.Module):
    """A layer with a mask that holds -inf on purpose."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, -math.inf, -math.inf]))


def unhealthy(seed: int) -> State:
    """Return a state in which two elements are no finite numbers that should be."""
    masked = Masked()
    fill(masked.layer, seed)
    weight = filled(torch.zeros(5, 2, dtype=torch.bfloat16), seed)
    weight[1, 1], weight[4, 0] = math.nan, math.inf
    return {"masked": masked, "weight": weight}


def partly_frozen(seed: int) -> State:
    """Return a backbone that is the same for every seed, and an adapter that is not."""
    torch.manual_seed(0)
    backbone, adapter = nn.Linear(24, 16), nn.Linear(16, 4, bias=False)
    fill(backbone, 0)
    fill(adapter, seed)
    frozen = {"halves": filled(torch.zeros(40, dtype=torch.bfloat16), 1), "wide": filled(torch.zeros(9, 8), 2)}
    return {"backbone": backbone, "adapter": adapter, "frozen": frozen, "seed": seed}


def resumed(seed: int) -> State:
    """Return the same, the adapter that of two before."""
    return {**partly_frozen(seed), "adapter": partly_frozen(seed - 2)["adapter"]}


def newer_types(seed: int) -> State:
    """Return tensors of the element types that format 1.5 added, beside one that every version knows."""
    codes = torch.arange(256, dtype=torch.uint8).roll(seed)
    return {
        "scales": codes.view(torch.float8_e8m0fnu).reshape(16, 16),
        "weights": codes.view(torch.float4_e2m1fn_x2).reshape(4, 8, 8),
        "pair": codes[:1].view(torch.float4_e2m1fn_x2).reshape(()),
        "norm": filled(torch.zeros(5), seed),
    }
