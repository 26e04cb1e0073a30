"""What ranks do in the tests of layouts: train and save here, build anew and load there, state every digest."""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import InvalidError
from tests.support.gloo_worlds import World
from tests.support.held_optimizers import HoldsOptimizers
from tests.support.small_networks import NormNet, adamw, digest, digests, plain, sharded, train
from tests.support.tuning import tuned


def _grid(mesh: list[int] | None) -> DeviceMesh | None:
    return None if mesh is None else init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard"))


PLACEMENTS = {"R": Replicate(), "0": Shard(0), "1": Shard(1), "2": Shard(2)}


def save_fsdp(
    world: World, path: str, mesh: list[int] | None = None, index_chunks_max: int = 1 << 17
) -> dict[str, str]:
    net = sharded(1, _grid(mesh))
    optimizer = adamw(net)
    train(net, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    settings = tuned(holdfast.Settings(), index_chunks_max=index_chunks_max)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "batches": 2}
    holdfast.save(path, state, settings=settings)
    return digests(net, optimizer)


def load_fsdp(world: World, path: str, stepped: bool = False, mesh: list[int] | None = None) -> dict[str, str]:
    net = sharded(2, _grid(mesh))
    optimizer = adamw(net)
    if stepped:
        train(net, optimizer, 1, seed=9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "batches": 0}
    report = holdfast.load(path, state)
    assert state["batches"] == 2, state["batches"]
    assert report.missing == report.unexpected == ()
    found = digests(net, optimizer)
    train(net, optimizer, 1, seed=5)
    return found


class Container(HoldsOptimizers):
    """As torchtitan's: one optimizer for each part of the model, and a state_dict that must not be called."""

    def __init__(self, net: nn.Module) -> None:
        self.optimizers = [adamw(part) for part in net.children()]
        super().__init__(net.parameters(), {})

    def state_dict(self) -> dict[str, object]:
        get_optimizer_state_dict(nn.Module(), self.optimizers)
        raise AssertionError("a call that may step")


def save_container(world: World, path: str) -> dict[str, str]:
    net = sharded(1)
    container = Container(net)
    train(net, container)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3) for each in container.optimizers]
    holdfast.save(path, {"model": net, "optimizer": container, "scheduler": schedulers[0], "batches": 2})
    found: dict[str, str] = {}
    for each in container.optimizers:
        found |= digests(net, each)
    return found


def load_container(world: World, path: str) -> dict[str, str]:
    net = sharded(2)
    container = Container(net)
    holdfast.load(path, {"model": net, "optimizer": container})
    found: dict[str, str] = {}
    for each in container.optimizers:
        found |= digests(net, each)
    train(net, container, 1, seed=5)
    return found


def save_plain(path: str) -> dict[str, str]:
    net = plain(1)
    optimizer = adamw(net)
    train(net, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "batches": 2}
    holdfast.save(path, state, process_group=False)
    return digests(net, optimizer)


def load_plain(path: str) -> dict[str, str]:
    net = plain(2)
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "batches": 0}
    holdfast.load(path, state, process_group=False)
    assert state["batches"] == 2
    return digests(net, optimizer)


def alone_beside_others(world: World, path: str) -> dict[str, str] | None:
    """Rank 0 loads a sharded checkpoint into an unsharded model; the other ranks do not take part at all."""
    return load_plain(path) if world.rank == 0 else None


def in_a_subgroup(world: World, path: str, ranks: list[int]) -> dict[str, str] | None:
    """A part of the ranks saves and loads among itself; for the others the call is refused."""
    group = dist.new_group(ranks)
    if world.rank not in ranks:
        try:
            holdfast.save(path, {"value": 1}, process_group=dist.group.WORLD if group is None else group)
        except (InvalidError, ValueError) as error:
            return {"refused": str(error)}
        return {"refused": ""}
    torch.manual_seed(3)
    first = {"weight": torch.randn(5, 3), "count": 4}
    holdfast.save(path, first, process_group=group)
    second: dict[str, object] = {"weight": torch.zeros(5, 3), "count": 0}
    holdfast.load(path, second, process_group=group)
    assert second["count"] == 4
    weight = second["weight"]
    assert isinstance(weight, torch.Tensor)
    return {"saved": digest(first["weight"]), "loaded": digest(weight)}


def mesh_in_a_subgroup(world: World, path: str, ranks: list[int]) -> dict[str, str] | None:
    """A mesh over some global ranks, saved by exactly that group; rank numbers differ from global ones."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    if world.rank not in ranks:
        return None
    torch.manual_seed(4)
    saved = distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
    holdfast.save(path, {"weight": saved}, process_group=mesh.get_group())
    loaded = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)])
    holdfast.load(path, {"weight": loaded}, process_group=mesh.get_group())
    return {"saved": digest(saved), "loaded": digest(loaded)}


def _wrapped(seed: int) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(NormNet())


def _train_norm(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 4, generator=random)).square().mean().backward()
        optimizer.step()


def save_ddp(world: World, path: str, same_batches: bool) -> dict[str, object]:
    """DDP with BatchNorm: each rank's batches leave it running statistics of its own.

    One forward pass only after each broadcast of buffers, so that they do differ at the save.
    """
    net = _wrapped(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    _train_norm(net, optimizer, 7 if same_batches else world.rank)
    report = holdfast.save(path, {"model": net, "optimizer": optimizer})
    return {"digests": digests(net.module, optimizer), "divergent": list(report.divergent)}


def load_ddp(world: World, path: str) -> dict[str, str]:
    net = _wrapped(2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    holdfast.load(path, {"model": net, "optimizer": optimizer})
    return digests(net.module, optimizer)


def load_norm_plain(path: str) -> dict[str, str]:
    torch.manual_seed(3)
    net = NormNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    holdfast.load(path, {"model": net, "optimizer": optimizer}, process_group=False)
    return digests(net, optimizer)


LAYOUTS: list[tuple[list[int], str, list[int]]] = [
    ([4], "1", [3, 10]),
    ([4], "1", [3, 2]),
    ([4], "0", [3]),
    ([4], "R", [4, 4]),
    ([2, 2], "00", [11, 2]),
    ([2, 2], "00", [3, 2]),
    ([2, 2], "01", [5, 7]),
    ([2, 2], "R0", [5, 3]),
    ([2, 2], "0R", [5, 3]),
    ([2, 2, 1], "012", [5, 3, 2]),
    ([1, 2, 2], "R01", [5, 3]),
    ([2, 1, 2], "20R", [3, 2, 5]),
    ([4], "0", [0, 3]),
    ([4], "R", []),
]
"""Mesh, placements and shape of DTensors on four ranks."""


def _tensor(number: int, layout: tuple[list[int], str, list[int]], *, fill: bool) -> DTensor:
    mesh_shape, placements, shape = layout
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    random = torch.Generator().manual_seed(number)
    whole = torch.randn(shape, generator=random) if fill else torch.full(shape, float("nan"))
    return distribute_tensor(whole, mesh, [PLACEMENTS[each] for each in placements])


def save_meshes(world: World, path: str) -> dict[str, object]:
    saved = {f"t{number}": _tensor(number, layout, fill=True) for number, layout in enumerate(LAYOUTS)}
    report = holdfast.save(path, saved, settings=tuned(holdfast.Settings(chunk_bytes=4096), window_bytes=4096))
    return {"digests": {name: digest(tensor) for name, tensor in saved.items()}, "report": asdict(report)}


def load_meshes(world: World, path: str, shift: int) -> dict[str, str]:
    """Load every tensor on the layout of another one of as many dimensions."""
    found = {}
    targets = {}
    for number, (_, _, shape) in enumerate(LAYOUTS):
        alike = [each for each in LAYOUTS if len(each[2]) == len(shape)]
        mesh, placements, _ = alike[(number + shift) % len(alike)]
        targets[f"t{number}"] = _tensor(number, (mesh, placements, shape), fill=False)
    holdfast.load(path, targets)
    for name, tensor in targets.items():
        found[name] = digest(tensor)
    return found


def refuse_partial(world: World, path: str) -> str:
    mesh = init_device_mesh("cpu", (world.size,))
    sums = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    try:
        holdfast.save(path, {"fine": torch.ones(1), "grads": {"sums": sums}})
    except InvalidError as error:
        return str(error)
    return ""


def refuse_partial_target(world: World, path: str) -> str:
    mesh = init_device_mesh("cpu", (world.size,))
    holdfast.save(path, {"sums": distribute_tensor(torch.ones(3), mesh, [Shard(0)])})
    target = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    try:
        holdfast.load(path, {"sums": target})
    except InvalidError as error:
        return str(error)
    return ""


def strided(world: World, path: str) -> bool:
    """FSDP over tensor parallelism makes strided shards; each rank's memory must be where its boxes say."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(8, 8))
    whole = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    for tensor in whole.values():
        torch.distributed.broadcast(tensor, 0)
    net.load_state_dict(whole)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    holdfast.save(path, {"model": net})
    stored = holdfast.open_checkpoint(path)
    return all(torch.equal(stored.read(f"model.{name}", framework="torch"), each) for name, each in whole.items())


def hand_written_halves(world: World, path: str) -> dict[str, str]:
    """Each rank holds its half of a layer as a plain parameter and declares nothing."""
    torch.manual_seed(world.rank)
    layer = nn.Linear(6, 2)
    said = {}
    try:
        holdfast.save(f"{path}-random", {"model": layer})
    except InvalidError as error:
        said["random"] = str(error)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    manager = holdfast.CheckpointManager(f"{path}-run")
    manager.save(1, {"model": layer}).wait()
    with torch.no_grad():
        layer.bias += world.rank
    try:
        manager.save(2, {"model": layer}).wait()
    except InvalidError as error:
        said["later"] = str(error)
    with torch.no_grad():
        layer.bias.zero_()
    manager.save(3, {"model": layer}).wait()
    said["steps"] = str(manager.steps())
    manager.close()
    return said


def differing_shapes(world: World, path: str) -> str:
    """One name, two shapes: parts of an unevenly split tensor, never mixed."""
    try:
        holdfast.save(path, {"part": torch.ones(3 + world.rank)})
    except InvalidError as error:
        return str(error)
    return ""
