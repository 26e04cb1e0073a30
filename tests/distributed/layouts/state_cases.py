"""What ranks do in the tests of containers in a state: optimizers in a list, values that cannot be saved."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from tests.support.gloo_worlds import World

INPUTS = torch.linspace(-1, 1, 24).reshape(4, 6)


class Trained:
    """A model, sharded or not, with an optimizer for its matrices and one for the rest."""

    def __init__(self, seed: int, shards: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        if shards > 1:
            fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (shards,)))
        matrices = [each for each in self.model.parameters() if each.ndim == 2]
        others = [each for each in self.model.parameters() if each.ndim != 2]
        self.optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
        self.schedulers = tuple(torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in self.optimizers)

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizers": self.optimizers, "schedulers": self.schedulers}

    def steps(self, count: int) -> list[float]:
        """Train on the same inputs on every rank; return the losses."""
        losses = []
        for _ in range(count):
            self.model.zero_grad()  # Before the forward: after it, FSDP2 may show whole parameters.
            loss = (self.model(INPUTS) - INPUTS).square().mean()
            loss.backward()
            for each in (*self.optimizers, *self.schedulers):
                each.step()
            losses.append(loss.item())
        return losses


def optimizers_in_a_list(world: World, path: str) -> list[float]:
    """Train under FSDP2, save, load into another job, and return the losses of training on in both."""
    run, other = Trained(0, world.size), Trained(1, world.size)
    run.steps(3)
    holdfast.save(path, run.state())
    holdfast.load(path, other.state())
    losses = run.steps(3)
    again = other.steps(3)
    assert again == losses, (again, losses)
    return losses


def refused_on_one_rank(world: World, path: str) -> str:
    """One rank has values that cannot be saved; return what is raised."""
    state: dict[str, object] = {"w": torch.ones(3)}
    if world.rank == 1:
        state |= {"args": argparse.Namespace(lr=0.1), "cfg": [{"device": object()}], "mask": torch.eye(3).to_sparse()}
    try:
        holdfast.save(path, state)
    except holdfast.InvalidError as error:
        return str(error)
    return "saved"


def moments_on_one_rank(world: World, path: str) -> list[str]:
    """Only rank 0 steps experts over a mesh; return what is raised, and after a step on all ranks how the save ends."""
    mesh = dist.init_device_mesh("cpu", (world.size,))
    experts = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([experts], lr=0.1, momentum=0.9)
    state = {"model": {"experts": experts}, "optimizer": optimizer}
    found = []
    for ranks in ((0,), range(world.size)):
        if world.rank in ranks:
            experts.grad = DTensor.from_local(torch.ones(4 // world.size, 4), mesh, [Shard(0)], run_check=False)
            optimizer.step()
        try:
            holdfast.save(f"{path}/{len(ranks)}", state)
            found.append("saved")
        except holdfast.InvalidError as error:
            found.append(str(error))
    return found


def cast_to_fresh_shards(world: World, path: str) -> list[str]:
    """Load bfloat16 shards into float32 ones whose optimizer is fresh, or has stepped; return what differs."""

    def build(dtype: torch.dtype, seed: int, *, stepped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)  # No length divides by two ranks.
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world.size,)))
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
        if stepped:
            model(INPUTS.to(dtype)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = build(torch.bfloat16, 0, stepped=True)
    holdfast.save(path, {"model": model, "optimizer": optimizer})
    wrong, losses = [], []
    for stepped in (False, True):
        other, fresh = build(torch.float32, 1, stepped=stepped)
        holdfast.load(path, {"model": other, "optimizer": fresh}, cast=True)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            for key, value in fresh.state[ours].items():
                saved = optimizer.state[theirs][key]
                local, expected = (each.to_local() if isinstance(each, DTensor) else each for each in (value, saved))
                if value.dtype != torch.float32 or not torch.equal(local, expected.float()):
                    wrong.append(f"stepped={stepped}: {key} is {value.dtype}")
        other.zero_grad()
        other(INPUTS).sum().backward()
        fresh.step()
        losses.append(other(INPUTS).sum().item())
    return wrong if losses[0] == losses[1] else [*wrong, f"losses {losses}"]


class Blocks(torch.optim.Optimizer):
    """Keeps a scale of each block of what its rank holds, as a plain tensor."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__([parameter], {})
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        self.state[parameter]["scales"] = torch.full((local.numel() // 4,), 2.0)


def replicas_into_shards(world: World, path: str) -> list[str]:
    """Load the state of replicas, of its own form, into that of shards; return what is raised and what there is."""
    whole = nn.Parameter(torch.ones(8, 4))
    holdfast.save(path, {"w": whole, "optimizer": Blocks(whole)})
    mesh = dist.init_device_mesh("cpu", (world.size,))
    shard = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]))
    optimizer = Blocks(shard)
    scales = optimizer.state[shard]["scales"].zero_()
    try:
        holdfast.load(path, {"w": shard, "optimizer": optimizer})
    except holdfast.InvalidError as error:
        unchanged = optimizer.state[shard]["scales"] is scales and not scales.any() and not shard.to_local().any()
        return [str(error), "unchanged" if unchanged else "changed"]
    return ["loaded"]


def names_of_each_rank(world: World, path: str) -> None:
    """Save modules of which every rank has its own, beside one that all have, as under a pipeline."""
    own = {f"{world.rank}.{name}": torch.ones(2) for name in ("z", "a", "m")}
    holdfast.save(path, {"shared": torch.ones(1), "stages": {"norm": torch.zeros(3), **own}, "step": 3})


def ascending_names_of_rank_0(world: World, path: str) -> None:
    """Save tensors of which every rank has its own: the names of rank 0 ascend, and come behind those of rank 1."""
    holdfast.save(path, {name: torch.ones(2) for name in ("ba" if world.rank else "xy")})
