"""Cases that gloo ranks run: training under random columns beside plain training, under DDP and FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo_worlds import World
from tests.unit.activations.runtime.parity import Network, digests


def random_columns(world: World, way: str) -> bool:
    """Train under columns that differ by rank and change, and plainly; whether every step leaves the same state."""
    torch.set_num_threads(1)
    plain, planned = (
        digests(lambda: _wrapped(way), way, is_planned=is_planned, rank=world.rank) for is_planned in (False, True)
    )
    return planned == plain


def _wrapped(way: str) -> tuple[nn.Module, nn.Module]:
    model = Network()
    if way.startswith("ddp"):
        return DistributedDataParallel(model, static_graph=way == "ddp-static"), model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if way == "fsdp2-mixed" else None)
    for unit in (*model.units, model):
        fully_shard(unit, mp_policy=policy)
    return model, model
