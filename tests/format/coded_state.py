"""The states that the golden checkpoints with coded pieces hold: numbers whose bits depend on a seed alone."""

from __future__ import annotations

import numpy as np
import torch

State = dict[str, object]


def normal(count: int, seed: int) -> torch.Tensor:
    """Return numbers with the exponents of weights: exact arithmetic of whole numbers, the same on every machine."""
    draws = np.random.PCG64(seed).random_raw(4 * count).reshape(4, count) >> 40
    sums = draws.astype(np.int64).sum(axis=0) - (1 << 25)
    return torch.from_numpy(np.ldexp(sums.astype(np.float64), -30).astype(np.float32))


def pairs(seed: int) -> State:
    """Return weights of 16 bits with their masters, one of them with what no rounding gives."""
    layer, half, odd = normal(4608, seed), normal(2100, seed + 1), normal(2100, seed + 2)
    odd[::50] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 65536.0, 3e38]).repeat(7)
    return {
        "model": {
            "layer": layer.bfloat16().reshape(48, 96),
            "half": half.half().reshape(30, 70),
            "odd": odd.bfloat16(),
        },
        "master": {"layer": layer.reshape(48, 96), "half": half.reshape(30, 70), "odd": odd},
    }


def training(seed: int) -> State:
    """Return a state that every codec has a part of."""
    first = normal(2500, seed + 3)
    sparse = torch.zeros(3000, dtype=torch.int32)
    sparse[::29] = torch.arange(len(sparse[::29]), dtype=torch.int32) - seed
    return {
        **pairs(seed),
        "moments": {"exp_avg": first, "exp_avg_sq": first * first},
        "clipped": normal(2100, seed + 4).bfloat16().float() * 0.8125,
        "wide": normal(700, seed + 5).double() / 3,
        "top": sparse,
        "empty": torch.zeros(2500, dtype=torch.complex64),
        "ids": torch.arange(1000).remainder(300) + seed,
        "noise": torch.from_numpy(np.random.PCG64(seed + 6).random_raw(700).view(np.uint8).copy()),
        "small": normal(5, seed + 7),
        "step": seed,
    }


def going_on(seed: int) -> State:
    """Return a state of which one pair and the moments are the same for every seed."""
    return {
        "frozen": pairs(1),
        "moments": {"exp_avg": normal(1100, 2)},
        "tuned": normal(2100, seed).bfloat16(),
        "step": seed,
    }
