"""Saves in the middle of gradient accumulation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.distributed.matrix.holding import clean, group_of, over, refusal_of
from tests.support.gloo_worlds import World
from tests.support.small_networks import digest


def _net(seed: int, layout: str) -> nn.Module:
    torch.manual_seed(seed)
    return over(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), layout)


def _micro_batch(model: nn.Module, number: int) -> None:
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).square().mean().backward()


def _gradients(model: nn.Module) -> dict[str, str]:
    """Return digests of the whole gradients, gathered by torch."""
    found = {}
    for name, each in model.named_parameters():
        assert each.grad is not None, name
        grad = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        found[clean(name)] = digest(grad)
    return found


def save_gradients(world: World | None, path: str, layout: str) -> dict[str, str]:
    model = _net(1, layout)
    _micro_batch(model, 1)
    holdfast.save(path, {"model": model}, grads=True, process_group=group_of(world))
    return _gradients(model)


def load_gradients(world: World | None, path: str, layout: str) -> dict[str, str]:
    model = _net(2, layout)
    holdfast.load(path, {"model": model}, grads=True, process_group=group_of(world))
    found = _gradients(model)
    # What was put there is what the next backward adds to.
    before = {name: each.grad for name, each in model.named_parameters()}
    _micro_batch(model, 2)
    assert all(each.grad is before[name] for name, each in model.named_parameters())
    return found


def _after_loading_over_what_is_unreduced(path: str) -> str:
    """Say whether a load leaves anything behind that the next backward would add."""

    def resumed(unreduced: bool) -> dict[str, str]:
        model = _net(3, "fsdp2")
        assert isinstance(model, FSDPModule)
        if unreduced:
            model.set_requires_gradient_sync(False)
            _micro_batch(model, 9)
            model.set_requires_gradient_sync(True)
        holdfast.load(path, {"model": model}, grads=True)
        _micro_batch(model, 4)
        return _gradients(model)

    return "same" if resumed(True) == resumed(False) else "stale gradients were added"


def refuse_unreduced(world: World, path: str) -> dict[str, str]:
    """What lies on no rank reduced, or differs by rank, is refused; without it, it can be done."""
    said = {}
    sharded = _net(1, "fsdp2")
    assert isinstance(sharded, FSDPModule)
    sharded.set_requires_gradient_sync(False)
    _micro_batch(sharded, world.rank)
    state = {"model": sharded}
    said["fsdp2"] = refusal_of(lambda: holdfast.save(path, state))
    said["fsdp2 asked"] = refusal_of(lambda: holdfast.save(path, state, grads=True))
    holdfast.save(f"{path}-without", state, grads=True, skip="*.grad")
    sharded.set_requires_gradient_sync(True)
    _micro_batch(sharded, world.rank)
    holdfast.save(f"{path}-reduced", state, grads=True)
    said["stale"] = _after_loading_over_what_is_unreduced(f"{path}-reduced")
    holdfast.save(f"{path}-without-ddp", {"epoch": 1, "model": sharded}, only="epoch")

    replicated = _net(1, "ddp")
    assert isinstance(replicated, DistributedDataParallel)
    with replicated.no_sync():
        _micro_batch(replicated, world.rank)
        said["ddp"] = refusal_of(lambda: holdfast.save(path, {"model": replicated}))
        holdfast.save(f"{path}-no-grads", {"model": replicated}, skip="*.grad")
        said["ddp asked"] = refusal_of(lambda: holdfast.save(path, {"model": replicated}, grads=True))

    flat = _net(1, "fsdp1")
    assert isinstance(flat, FullyShardedDataParallel)
    _micro_batch(flat, world.rank)
    # One rank may hold no gradient of a parameter; the refusal of the other is everybody's.
    said["fsdp1 asked"] = refusal_of(lambda: holdfast.save(path, {"model": flat}, grads=True))
    with flat.no_sync():
        _micro_batch(flat, world.rank)
        said["fsdp1"] = refusal_of(lambda: holdfast.save(path, {"model": flat}))
    dist.barrier()
    return said
