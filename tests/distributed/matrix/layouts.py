"""The layouts of the matrix: each builds the one model over its ranks, trains it and states digests of all it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.distributed.matrix import models
from tests.support.small_networks import digest

State = dict[str, object]


@dataclass(frozen=True, slots=True)
class Built:
    """A model on its ranks."""

    state: State
    """What is passed to Holdfast."""

    train: Callable[[list[int]], None]
    """Takes one step per number, with the batch of that number."""

    digests: Callable[[], dict[str, str]]
    """Digest of every whole tensor this rank has a part in, and every group; a collective."""


@cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh that all layouts of a process share, as a training makes its meshes once.

    Each of its groups has threads and sockets until the process ends: one mesh for each load would add up to
    a thousand threads.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _of_module(model: nn.Module, inner: nn.Module | None = None) -> Built:
    optimizer = models.adamw((each, each.ndim) for each in model.parameters())
    return Built(
        {"model": model, "optimizer": optimizer},
        lambda steps: models.train(model, optimizer, steps),
        lambda: models.of_module(inner or model, optimizer),
    )


def one(seed: int) -> Built:
    return _of_module(models.net(seed))


def ddp(seed: int) -> Built:
    model = DistributedDataParallel(models.net(seed))
    return _of_module(model, model.module)


def _fsdp1(seed: int, strategy: ShardingStrategy, mesh: DeviceMesh | None = None) -> Built:
    model = models.net(seed)
    dimensions = {name: each.ndim for name, each in model.named_parameters()}
    shapes = {name: each.shape for name, each in model.named_parameters()}
    options = {
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
        "sharding_strategy": strategy,
        "device_mesh": mesh,
    }
    for name in model.blocks:
        model.blocks[name] = FullyShardedDataParallel(model.blocks[name], **options)
    wrapped = FullyShardedDataParallel(model, **options)

    def clean(name: str) -> str:
        return name.replace("_fsdp_wrapped_module.", "")

    optimizer = models.adamw((each, dimensions[clean(name)]) for name, each in wrapped.named_parameters())

    def digests() -> dict[str, str]:
        """Ask FSDP1 for the parameters; its own gathering of optimizer state mixes up moments on CPU (torch 2.13)."""
        kind = FullStateDictConfig(rank0_only=False)
        FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, kind)
        found = {name: digest(tensor) for name, tensor in wrapped.state_dict().items()}
        names = {each: clean(name) for name, each in wrapped.named_parameters()}
        runs: dict[str, Tensor] = {}
        for parameter, group in models.members(optimizer):
            name = names[parameter]
            found[f"{name}/group"] = models.hyperparameters(group)
            for key, value in optimizer.state.get(parameter, {}).items():
                if key == "step":
                    found[f"{name}/{key}"] = digest(value)
                else:
                    runs[f"{name}/{key}"] = value
        for key, value in models.laid_end_to_end(runs, wrapped.process_group).items():
            found[key] = digest(value.view(shapes[key.rpartition("/")[0]]))
        return found

    state: State = {"model": wrapped, "optimizer": optimizer}
    return Built(state, lambda steps: models.train(wrapped, optimizer, steps), digests)


def fsdp1(seed: int) -> Built:
    return _fsdp1(seed, ShardingStrategy.FULL_SHARD)


def fsdp1_kept(seed: int) -> Built:
    """Parameters stay whole after a forward: saving and loading find them so, with and without a graph behind them."""
    built = _fsdp1(seed, ShardingStrategy.SHARD_GRAD_OP)
    model = built.state["model"]
    assert isinstance(model, FullyShardedDataParallel)

    def train(steps: list[int]) -> None:
        built.train(steps)
        with torch.set_grad_enabled(len(steps) > 1):
            model(models.batch(0))

    return Built(built.state, train, built.digests)


def fsdp1_hybrid(seed: int) -> Built:
    mesh = _mesh((2, 2), ("replicate", "shard"))
    return _fsdp1(seed, ShardingStrategy.HYBRID_SHARD, mesh)


def _fsdp2(model: models.Net, mesh: DeviceMesh) -> models.Net:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2(seed: int) -> Built:
    return _of_module(_fsdp2(models.net(seed), _mesh((dist.get_world_size(),))))


def hsdp(seed: int) -> Built:
    mesh = _mesh((2, 2), ("replicate", "shard"))
    return _of_module(_fsdp2(models.net(seed), mesh))


def _tensor_parallel(model: models.Net, mesh: DeviceMesh) -> models.Net:
    """Split embedding, blocks and head; the rest stays plain, equal on all ranks of the mesh."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    return model


def tp(seed: int) -> Built:
    return _of_module(_tensor_parallel(models.net(seed), _mesh((2,), ("tp",))))


def _replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make what no style of tensor parallelism took a replicated DTensor, as sequence parallelism does with norms."""
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            if not isinstance(each, DTensor):
                setattr(module, name, nn.Parameter(distribute_tensor(each.detach(), mesh, [Replicate()])))


def tp_fsdp2(seed: int) -> Built:
    """Tensor parallel inside FSDP2: strided shards where both split one dimension."""
    mesh = _mesh((2, 2), ("dp", "tp"))
    model = _tensor_parallel(models.net(seed), mesh["tp"])
    _replicated(model, mesh["tp"])
    _fsdp2(model, mesh["dp"])
    assert any("_StridedShard" in str(each.placements) for each in model.parameters()), "what this layout is for"
    return _made_up(model)


def tp_fsdp2_partial(seed: int) -> Built:
    """Tensor parallel inside FSDP2, of which the plan names some modules only.

    One norm is replicated by hand. All else is on one of two sibling meshes, as Transformers leaves it.
    """
    mesh = _mesh((2, 2), ("dp", "tp"))
    model = _tensor_parallel(models.net(seed), mesh["tp"])
    distribute_module(model.blocks["0"].norm, mesh["tp"])
    _fsdp2(model, mesh["dp"])
    assert _ranks_of(model.experts.weight) != _ranks_of(model.embed.weight), "what this layout is for"
    return _made_up(model)


def tp_hsdp_partial(seed: int) -> Built:
    """Replicas of shards of tensor parallel modules: what the plan leaves out is on 2-d siblings."""
    mesh = _mesh((2, 2, 2), ("replicate", "shard", "tp"))
    model = _tensor_parallel(models.net(seed), mesh["tp"])
    return _made_up(_fsdp2(model, mesh["replicate", "shard"]))


def three_dimensions(seed: int) -> Built:
    """Data, context and tensor parallelism, of which FSDP2 takes the first two as one dimension."""
    mesh = _mesh((2, 1, 2), ("dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    model = _tensor_parallel(models.net(seed), mesh["tp"])
    return _made_up(_fsdp2(model, mesh["dp_cp"]))


def tp_by_hand(seed: int) -> Built:
    """Tensor parallel twice, with data parallelism by hand between them: the split modules are on siblings."""
    mesh = _mesh((2, 2), ("dp", "tp"))
    return _made_up(_tensor_parallel(models.net(seed), mesh["tp"]))


def ep_by_hand(seed: int) -> Built:
    """Experts on a mesh of their own, twice; the dense part under FSDP2 on a mesh of another call."""
    model = models.net(seed)
    mesh = _mesh((2, 2), ("edp", "ep"))
    for name, each in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(each.detach(), mesh["ep"], [Shard(0)])))
    dense = _mesh((4,), ("dp",))
    for block in model.blocks.values():
        fully_shard(block, mesh=dense)
    fully_shard(model, mesh=dense, ignored_params=set(model.experts.parameters()))
    return _made_up(model)


def _ranks_of(parameter: Tensor) -> list[int]:
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh.mesh.flatten().tolist()


def sequence_parallel(seed: int) -> Built:
    """The sequence is split, not the parameters: all of them are replicated DTensors."""
    model = models.net(seed)
    _replicated(model, _mesh((2,), ("sp",)))
    return _made_up(model)


def _made_up(model: nn.Module) -> Built:
    optimizer = models.adamw((each, each.ndim) for each in model.parameters())
    return Built(
        {"model": model, "optimizer": optimizer},
        lambda steps: models.step_with_made_up_gradients(model.parameters(), optimizer, steps),
        lambda: models.of_module(model, optimizer),
    )


def pp(seed: int) -> Built:
    return _pipeline(seed, [["embed", "blocks.0"], ["blocks.1", "experts", "head"]])


def pp_interleaved(seed: int) -> Built:
    """Four stages over two ranks, as interleaved schedules have it: each rank holds two that do not follow."""
    return _pipeline(seed, [["embed", "blocks.1"], ["blocks.0", "experts", "head"]])


def _pipeline(seed: int, parts: list[list[str]]) -> Built:
    """Each rank keeps the modules of its stages under their own names and lets go of the rest."""
    model = models.net(seed)
    order = ["embed", "blocks.0", "blocks.1", "experts", "head"]
    modules = {name: model.get_submodule(name) for name in order}
    rank, size = dist.get_rank(), dist.get_world_size()
    owner = {name: rank for rank, names in enumerate(parts[:size]) for name in names}
    for name in order:
        if owner[name] != rank:
            parent, _, child = name.rpartition(".")
            del model.get_submodule(parent)._modules[child]
    optimizer = models.adamw((each, each.ndim) for each in model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = models.batch(number)
        links: list[tuple[str, Tensor, Tensor]] = []
        flowing: Tensor = x
        for at, name in enumerate(order):
            if owner[name] != rank:
                continue
            if at and owner[order[at - 1]] != rank:
                flowing = torch.empty(len(x), models.WIDTH)
                dist.recv(flowing, owner[order[at - 1]])
                flowing.requires_grad_()
            entering = flowing
            flowing = modules[name](flowing)
            links.append((name, entering, flowing))
            if at + 1 < len(order) and owner[order[at + 1]] != rank:
                dist.send(flowing.detach(), owner[order[at + 1]])
        for name, entering, leaving in reversed(links):
            at = order.index(name)
            if at + 1 == len(order):
                leaving.square().sum().backward()
            elif owner[order[at + 1]] != rank:
                gradient = torch.empty_like(leaving)
                dist.recv(gradient, owner[order[at + 1]])
                leaving.backward(gradient)
            if at and owner[order[at - 1]] != rank:
                assert entering.grad is not None
                dist.send(entering.grad, owner[order[at - 1]])
        optimizer.step()

    def train(steps: list[int]) -> None:
        for number in steps:
            step(number)

    state: State = {"model": model, "optimizer": optimizer}
    return Built(state, train, lambda: models.of_module(model, optimizer))


def ep(seed: int) -> Built:
    """Experts on a mesh of their own, two of four on each rank; the dense part under FSDP2 on the same ranks."""
    model = models.net(seed)
    mesh = _mesh((2,), ("ep",))
    for name, each in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(0)])))
    dense = _mesh((2,), ("dp",))
    for block in model.blocks.values():
        fully_shard(block, mesh=dense)
    fully_shard(model, mesh=dense, ignored_params=set(model.experts.parameters()))
    return _of_module(model)


def zero(seed: int) -> Built:
    """Parameters laid end to end and cut into equal runs, through rows: each rank steps its own run alone."""
    model = models.net(seed)
    named = dict(model.named_parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    share = -(-sum(each.numel() for each in named.values()) // size)
    first, last = rank * share, (rank + 1) * share
    locals_: dict[str, tuple[Tensor, int]] = {}
    at = 0
    for name, each in named.items():
        start, stop = max(first - at, 0), min(last - at, each.numel())
        if start < stop:
            locals_[name] = (each.detach().reshape(-1)[start:stop].clone(), start)
        at += each.numel()
    optimizer = models.adamw((local, named[name].ndim) for name, (local, _) in locals_.items())

    def train(steps: list[int]) -> None:
        models.step_with_made_up_gradients([local for local, _ in locals_.values()], optimizer, steps)

    def digests() -> dict[str, str]:
        shapes = {name: each.shape for name, each in named.items()}
        found = {name: digest(each) for name, each in buffers.items()}
        found |= {name: digest(each) for name, each in models.gathered(locals_, shapes).items()}
        for key in ("exp_avg", "exp_avg_sq"):
            runs = {name: (optimizer.state[local][key], start) for name, (local, start) in locals_.items()}
            found |= {f"{name}/{key}": digest(each) for name, each in models.gathered(runs, shapes).items()}
        names = {local: name for name, (local, _) in locals_.items()}
        for parameter, group in models.members(optimizer):
            found[f"{names[parameter]}/group"] = models.hyperparameters(group)
            found[f"{names[parameter]}/step"] = digest(optimizer.state[parameter]["step"])
        return found

    buffers = dict(model.named_buffers())
    sharded: dict[str, object] = {
        name: holdfast.Sharded(local, global_shape=tuple(named[name].shape), flat_start=start)
        for name, (local, start) in locals_.items()
    }
    return Built({"model": sharded | buffers, "optimizer": optimizer}, train, digests)


@dataclass(frozen=True, slots=True)
class Kind:
    """A row and a column of the table."""

    title: str
    ranks: int
    build: Callable[[int], Built]


KINDS: Mapping[str, Kind] = {
    "one": Kind("one process", 1, one),
    "ddp": Kind("DDP ×2", 2, ddp),
    "fsdp1": Kind("FSDP1 ×2", 2, fsdp1),
    "fsdp1-kept": Kind("FSDP1 SHARD_GRAD_OP ×3", 3, fsdp1_kept),
    "fsdp1-hybrid": Kind("FSDP1 HYBRID 2×2", 4, fsdp1_hybrid),
    "fsdp2-2": Kind("FSDP2 ×2", 2, fsdp2),
    "fsdp2-4": Kind("FSDP2 ×4", 4, fsdp2),
    "hsdp": Kind("HSDP 2×2", 4, hsdp),
    "tp": Kind("TP ×2", 2, tp),
    "tp-fsdp2": Kind("FSDP2 2 × TP 2", 4, tp_fsdp2),
    "tp-fsdp2-partial": Kind("FSDP2 2 × TP 2, partial plan", 4, tp_fsdp2_partial),
    "tp-hsdp-partial": Kind("HSDP 2×2 × TP 2, partial plan", 8, tp_hsdp_partial),
    "three-dimensions": Kind("FSDP2 over DP 2 × CP 1, × TP 2, partial plan", 4, three_dimensions),
    "tp-by-hand": Kind("TP 2, DP 2 by hand", 4, tp_by_hand),
    "ep-by-hand": Kind("EP 2, DP 2 by hand + FSDP2 ×4", 4, ep_by_hand),
    "sp": Kind("SP ×2", 2, sequence_parallel),
    "pp": Kind("PP ×2", 2, pp),
    "pp-interleaved": Kind("PP ×2, two stages each", 2, pp_interleaved),
    "ep": Kind("EP 2 + FSDP2 ×2", 2, ep),
    "zero": Kind("flat ranges ×3", 3, zero),
}
