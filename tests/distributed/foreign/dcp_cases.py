"""What ranks do in the tests of DCP: train, save with torch itself, and leave what every tensor truly held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast import api
from tests.support.gloo_worlds import World
from tests.support.small_networks import adamw, digests, plain, sharded, train

TRUTH = "truth.safetensors"
"""Beside a checkpoint's folder: every tensor whole, by the key it has in DCP."""


def save(
    world: World,
    path: str,
    mesh: list[int] | None = None,
    tensor_parallel: bool = False,
    flatten: bool = False,
    asynchronous: bool = False,
    writer: Mapping[str, object] | None = None,
) -> None:
    """Train, save and leave the truth.

    Args:
        world: Ranks.
        path: The folder of the checkpoint.
        mesh: Lengths of the mesh; the last dimension shards, one before it replicates, or shards too under
            `tensor_parallel`. None for DDP's way: the same on every rank.
        tensor_parallel: Whether the last dimension of the mesh is for tensor parallelism.
        flatten: Whether optimizer state is flattened, as torchtitan does.
        asynchronous: Whether it is saved in the background.
        writer: What the writer is told.
    """
    net, optimizer = _trained(mesh, tensor_parallel)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optim = get_state_dict(net, optimizer, options=options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": model, "optimizer": optim, "scheduler": scheduler, "step": 2, "notes": {"tags": ["a", ("b", 1)]}}
    _leave_truth(world, path, {"model": model, "optimizer": optim})
    options_of_writer = dict(writer or {})
    if "serialization_format" in options_of_writer:
        options_of_writer["serialization_format"] = SerializationFormat(options_of_writer["serialization_format"])
    storage = FileSystemWriter(path, **options_of_writer)  # type: ignore[arg-type]
    if asynchronous:
        dcp.async_save(state, storage_writer=storage).result()  # type: ignore[union-attr]
    else:
        dcp.save(state, storage_writer=storage)


def load(world: World, path: str) -> dict[str, str]:
    """Load with Holdfast what other ranks saved with torch; return every digest."""
    net = sharded(3)
    optimizer = adamw(net)
    report = holdfast.load(path, {"model": net, "optimizer": optimizer})
    assert report.missing == report.unexpected == ()
    return digests(net, optimizer)


def _trained(mesh: list[int] | None, tensor_parallel: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a model and its optimizer after two steps."""
    net: nn.Module
    if mesh is None:
        net = plain(1)
    elif tensor_parallel:
        grid = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("data", "tensor"))
        net = even()
        parallelize_module(net, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=grid["data"])
    else:
        net = sharded(1, init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard")[-len(mesh) :]))
    optimizer = adamw(net)
    if tensor_parallel:
        net(torch.linspace(-1, 1, 36).reshape(6, 6)).square().sum().backward()
        optimizer.step()
    else:
        train(net, optimizer)
    return net, optimizer


def even() -> nn.Module:
    """Return a model whose lengths two ranks split evenly, as tensor parallelism asks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6))


def _leave_truth(world: World, path: str, state: Mapping[str, object]) -> None:
    found: dict[str, torch.Tensor] = {}
    _whole(state, "", found)
    if world.rank == 0:
        Path(path).mkdir(parents=True)
        save_file(found, Path(path).with_suffix("." + TRUTH))
    dist.barrier()


def _whole(value: object, path: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            _whole(each, f"{path}.{key}" if path else str(key), found)
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[path] = whole.detach().clone().contiguous()


def export(world: World, path: str) -> dict[str, str]:
    """Save with Holdfast what FSDP2 trained, and have rank 0 export it; return every digest."""
    net, optimizer = _trained([world.size], tensor_parallel=False)
    holdfast.save(f"{path}.saved", {"model": net, "optimizer": optimizer, "step": 7})
    if world.rank == 0:
        api.export(f"{path}.saved", path, to="dcp", model_only=False, shard_bytes=1000)
    dist.barrier()
    return digests(net, optimizer)


def load_by_dcp(world: World, path: str) -> dict[str, str]:
    """Load with torch itself what was exported, into FSDP2; return every digest."""
    net = sharded(3)
    optimizer = adamw(net)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optim = get_state_dict(net, optimizer, options=options)
    state = {"model": model, "optimizer": optim, "step": 0}
    dcp.load(state, checkpoint_id=path)
    assert state["step"] == 7
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim, options=options)
    return digests(net, optimizer)
