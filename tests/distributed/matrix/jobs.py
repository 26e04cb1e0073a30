"""Tensors laid out by hand, several jobs in one world, and values that are each rank's own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import CheckpointError
from tests.distributed.matrix import models
from tests.distributed.matrix.holding import refusal_of
from tests.support.gloo_worlds import World
from tests.support.small_networks import digest


def sharded_tensors(world: World, path: str) -> dict[str, object]:
    """Two ranks hold a checkerboard of four boxes, as a ShardedTensor, at every place where one may stand."""
    whole = torch.arange(42, dtype=torch.float32).view(7, 6)
    boxes = [[(0, 0, 5, 3), (5, 3, 2, 3)], [(5, 0, 2, 3), (0, 3, 5, 3)]][world.rank]

    def made(source: Tensor) -> object:
        local = [
            LocalShard(
                source[row : row + height, column : column + width].clone(),
                ShardMetadata(
                    shard_offsets=[row, column], shard_sizes=[height, width], placement=f"rank:{world.rank}/cpu"
                ),
            )
            for row, column, height, width in boxes
        ]
        return init_from_local_shards(local, *whole.shape)

    def held(value: object) -> list[str]:
        return [digest(shard.tensor) for shard in value.local_shards()]  # type: ignore[attr-defined]

    saved = {"weight": made(whole), "inside": [made(whole + 1), 1]}
    holdfast.save(path, saved)
    empty = torch.zeros_like(whole)
    inside = made(empty)
    back: dict[str, object] = {"weight": made(empty), "inside": [inside, 0]}
    holdfast.load(path, back)
    plain: dict[str, object] = {"weight": empty.clone(), "inside": [empty.clone(), 0]}
    holdfast.load(path, plain)
    weight = plain["weight"]
    assert isinstance(weight, Tensor)
    kept = back["inside"]
    assert isinstance(kept, list)
    return {
        "same": held(back["weight"]) == held(saved["weight"]),
        "inside": held(kept[0]) == held(saved["inside"][0]) and kept[1] == 1,  # type: ignore[index]
        "in place": kept[0] is inside,
        "whole": bool(torch.equal(weight, whole)),
    }


def stages_that_reuse_a_name(world: World, path: str) -> dict[str, object]:
    """Two pipeline stages whose modules have one name: equal at first, then each trained on its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(1)
    model = fully_shard(nn.Linear(6, 5), mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    models.step_with_made_up_gradients(model.parameters(), optimizer, [1])
    first = models.of_module(model, optimizer)
    with holdfast.CheckpointManager(path) as manager:
        manager.save(1, state).wait()
        models.step_with_made_up_gradients(model.parameters(), optimizer, [2 + world.rank // 2])
        refusal = refusal_of(lambda: manager.save(2, state).wait())
        loaded = manager.load(state)
    return {"refusal": refusal, "loaded": loaded, "same": models.of_module(model, optimizer) == first}


def refuse_unrelated_meshes(world: World, path: str) -> str:
    """Three ranks share one layer, the fourth has another of that name alone."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    mesh = DeviceMesh.from_group(groups[world.rank // 3], "cpu")
    model = fully_shard(nn.Linear(6, 5), mesh=mesh)
    return refusal_of(lambda: holdfast.save(path, {"model": model}))


def actor_and_critic(world: World, path: str) -> dict[str, object]:
    """Two jobs in one world, each with its own ranks, model, manager and steps, saving and loading at once."""
    ranks = [0, 1] if world.rank < 2 else [2, 3]
    groups = {0: dist.new_group([0, 1]), 2: dist.new_group([2, 3])}
    group = groups[ranks[0]]
    role = "actor" if world.rank < 2 else "critic"

    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1 if role == "critic" else 3))
        fully_shard(model, mesh=init_mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    init_mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model, optimizer = built(1)
    manager = holdfast.CheckpointManager(f"{path}/{role}", process_group=group)
    for step in range(1, 4 if role == "actor" else 6):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        manager.save(step, {"model": model, "optimizer": optimizer, "role": role}).wait()
    saved = models.of_module(model, optimizer)
    model, optimizer = built(2)
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "role": ""}
    step = manager.load(state)
    manager.close()
    return {
        "role": state["role"],
        "step": step,
        "same": models.of_module(model, optimizer) == saved,
        "steps": manager.steps(),
    }


def _draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Loader:
    """A data loader with a place of its own on every rank."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        position = state["position"]
        assert isinstance(position, int)
        self.position = position


def save_own(world: World, path: str) -> list[float]:
    random.seed(world.rank)
    np.random.seed(world.rank)
    torch.manual_seed(world.rank)
    _draws()
    state = {
        "rng": holdfast.RngState(),
        "loader": holdfast.PerRank(Loader(100 + world.rank), resize="first"),
        "shard": holdfast.PerRank([world.rank, "text"]),
    }
    holdfast.save(path, state)
    return _draws()


def load_own(world: World, path: str) -> dict[str, object]:
    loader, shard = holdfast.PerRank(Loader(0)), holdfast.PerRank(None)
    holdfast.load(path, {"rng": holdfast.RngState(), "loader": loader, "shard": shard})
    assert isinstance(loader.value, Loader)
    return {"draws": _draws(), "position": loader.value.position, "shard": shard.value}


def load_own_resized(world: World, path: str) -> dict[str, object]:
    """Three ranks take what two saved."""
    holdfast.load(path, {"rng": holdfast.RngState()}, only=["rng"])
    draws = _draws()
    first = holdfast.PerRank(Loader(0), resize="first")
    holdfast.load(path, {"loader": first}, only=["loader"])
    assert isinstance(first.value, Loader)

    def summed(values: Sequence[object], rank: int, ranks: int) -> object:
        return [values, rank, ranks]

    made = holdfast.PerRank(None, resize=summed)
    holdfast.load(path, {"shard": made}, only=["shard"])
    try:
        holdfast.load(path, {"shard": holdfast.PerRank(None)}, only=["shard"])
    except CheckpointError as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        refused = ""
    holdfast.load(path, {"rng": holdfast.RngState()}, only=["rng"])
    return {"draws": draws, "again": _draws(), "first": first.value.position, "made": made.value, "refused": refused}
