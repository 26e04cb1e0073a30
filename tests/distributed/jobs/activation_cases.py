"""Cases that gloo ranks run: training under random columns beside plain training, under DDP and FSDP2."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.activations.runtime.attach import attach, trace_units
from holdfast.activations.runtime.column_program import ColumnProgram
from tests.support.gloo_worlds import World
from tests.unit.activations.runtime.random_units import packs, random_column
from tests.unit.activations.runtime.test_attach import NAMES, TOKENS, Gpt

STEPS, ACCUMULATED = 5, 2


def random_columns(world: World, way: str) -> bool:
    """Train two models, one under other random columns on each rank and at each step; whether both stay equal."""
    torch.set_num_threads(1)
    (plain, plain_model), (called, model) = _wrapped(way), _wrapped(way)
    traces = trace_units(model, NAMES, lambda: _step(called, world.rank, way))
    model.zero_grad()
    assert not any(trace.why_not for trace in traces.values())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain_model, model)]
    for step in range(STEPS):
        rng = random.Random(100 * step + world.rank)
        programs = {
            name: ColumnProgram(trace, random_column(trace, rng), pack=packs(step, 0.2))
            for name, trace in traces.items()
        }
        attached = attach(model, programs)
        losses = [_step(each, world.rank, way) for each in (plain, called)]
        pairs = zip(_gradients(plain_model), _gradients(model), strict=True)
        if losses[0] != losses[1] or not all(torch.equal(one, other) for one, other in pairs):
            return False
        assert (attached.counts.planned, attached.counts.other) == (ACCUMULATED * len(NAMES), 0)
        attached.detach()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return True


def _wrapped(way: str) -> tuple[nn.Module, nn.Module]:
    model = Gpt()
    if way.startswith("ddp"):
        return DistributedDataParallel(model, static_graph=way == "ddp-static"), model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if way == "fsdp2-mixed" else None)
    for unit in (*model.blocks, model):
        fully_shard(unit, mp_policy=policy)
    return model, model


def _step(model: nn.Module, rank: int, way: str) -> list[float]:
    torch.manual_seed(4 + rank)
    losses = []
    for number in range(ACCUMULATED):
        with torch.autocast("cpu", torch.bfloat16, enabled=way.endswith("autocast")):
            output = model((TOKENS + rank + number) % 50)
        loss = nn.functional.cross_entropy(output.float().flatten(0, 1), TOKENS.flatten())
        loss.backward()
        losses.append(loss.item())
    return losses


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
