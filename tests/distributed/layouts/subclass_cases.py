"""Cases of tensor subclasses that a mesh splits; `test_subclasses.py` runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import InvalidError
from tests.support.gloo_worlds import World
from tests.support.tensor_subclasses import KnownMomentum, Momentum, Pair, blocks_of

KINDS: dict[str, type[Momentum]] = {"known": KnownMomentum, "unknown": Momentum}


def training(kind: str, placements: list[Any] | None, steps: int, world_size: int = 1) -> dict[str, Any]:
    """Return a model, split by `placements` if given, and its optimizer after some steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 12, bias=False)
    if placements is not None:
        mesh = init_device_mesh("cpu", (world_size,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    optimizer = KINDS[kind](model.parameters())
    for number in range(steps):
        grad = torch.sin(torch.arange(96.0).reshape(12, 8) + number)
        like = model.weight
        model.weight.grad = (
            distribute_tensor(grad, like.device_mesh, like.placements) if isinstance(like, DTensor) else grad
        )
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def whole(state: dict[str, Any]) -> list[list[float]]:
    """Return the weight and its momentum."""
    (kept,) = [each["momentum"] for each in state["optimizer"].state.values()]
    momentum = kept
    if isinstance(kept, DTensor):
        local = kept.to_local().dequantized()
        momentum = DTensor.from_local(local, kept.device_mesh, kept.placements, run_check=False).full_tensor()
    else:
        momentum = kept.dequantized()
    weight = state["model"].weight.detach()
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return [weight.flatten().tolist(), momentum.flatten().tolist()]


def _placements(dim: int | None) -> list[Any]:
    return [Replicate() if dim is None else Shard(dim)]


def save(world: World, path: str, kind: str, dim: int | None = 0) -> list[list[float]]:
    state = training(kind, _placements(dim), 3, world.size)
    holdfast.save(path, state)
    return whole(state)


def load(world: World, path: str, kind: str, dim: int | None = 0, steps: int = 0) -> list[list[float]]:
    state = training(kind, _placements(dim), steps, world.size)
    holdfast.load(path, state)
    return whole(state)


def refuse(world: World, path: str, kind: str, dim: int | None = 0) -> str:
    state = training(kind, _placements(dim), 0, world.size)
    try:
        holdfast.load(path, state)
    except InvalidError as error:
        return str(error)
    return "loaded"


def _mixed(world: World, local: torch.Tensor, rows: int) -> DTensor:
    mesh = init_device_mesh("cpu", (world.size,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 4)), stride=(4, 1))


def refuse_mixed(world: World, path: str) -> str:
    """One rank holds a plain part, another a subclass."""
    plain = torch.ones(2, 4)
    try:
        holdfast.save(path, {"w": _mixed(world, blocks_of(plain) if world.rank else plain, 4)})
    except InvalidError as error:
        return str(error)
    return "saved"


class Opaque(Pair):
    """A wrapper that does not say what is inside."""

    __tensor_flatten__ = None


def refuse_opaque(world: World, path: str) -> str:
    """A DTensor around a wrapper without `__tensor_flatten__`."""
    plain = torch.ones(2, 4)
    try:
        holdfast.save(path, {"w": _mixed(world, Opaque(plain, plain), 4)})
    except InvalidError as error:
        return str(error)
    return "saved"


def refuse_unequal(world: World, path: str) -> str:
    """Shards of unequal size of a class that is not known."""
    try:
        holdfast.save(path, {"w": _mixed(world, blocks_of(torch.ones(3 - world.rank, 4)), 5)})
    except InvalidError as error:
        return str(error)
    return "saved"


def refuse_unlike(world: World, path: str, split: bool, unlike: str) -> str:
    """Ranks hold another context, or one a plain tensor, under one name."""
    value: torch.Tensor = blocks_of(torch.ones(2, 4), rank=world.rank if unlike == "context" else 0)
    if unlike == "class" and world.rank:
        value = torch.ones(2, 4)
    try:
        holdfast.save(path, {"w": _mixed(world, value, 4) if split else value})
    except InvalidError as error:
        return str(error)
    return "saved"
