"""What ranks do in the tests of DCP above Holdfast: train, save and load by DCP's verbs, and fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast._face import wiring
from holdfast.integrations import dcp
from tests.distributed.foreign.dcp_cases import even
from tests.doubles.faults import Faults, FaultyStore, kill_process
from tests.support.gloo_worlds import World
from tests.support.small_networks import adamw, digests, plain, sharded, train


def save(world: World, path: str, kind: str, flatten: bool = False, asynchronous: bool = False) -> dict[str, str]:
    """Train, save by the verbs, change the model, load by the verbs; return the digests of what was saved."""
    net, optimizer = _trained(kind)
    expected = digests(net, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optim = get_state_dict(net, optimizer, options=options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optim,
        "scheduler": scheduler,
        "step": 2,
        "notes": ["a", ("b",)],
    }
    if asynchronous:
        saving: Any = dcp.async_save(state, checkpoint_id=path)
        # What training does next must not reach the checkpoint.
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)
        saving.result()
    else:
        dcp.save(state, checkpoint_id=path)
    other, stepped = _trained(kind, steps=1)
    model, optim = get_state_dict(other, stepped, options=options)
    loaded: dict[str, Any] = {"model": model, "optimizer": optim, "step": 0, "notes": None}
    dcp.load(loaded, checkpoint_id=path)
    assert (loaded["step"], loaded["notes"]) == (2, ["a", ("b",)])
    set_state_dict(other, stepped, model_state_dict=model, optim_state_dict=optim, options=options)
    assert digests(other, stepped) == expected
    return expected


def _trained(kind: str, steps: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    net: nn.Module
    if kind == "replicas":
        net = plain(1)
    elif kind == "tensor-parallel":
        grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        net = even()
        parallelize_module(net, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=grid["data"])
    else:
        shape, names = ((2,), ("shard",)) if kind == "fsdp2" else ((2, 1), ("replicate", "shard"))
        net = sharded(1, init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = adamw(net)
    if kind == "tensor-parallel":
        for _ in range(steps):
            net(torch.linspace(-1, 1, 36).reshape(6, 6)).square().sum().backward()
            optimizer.step()
    else:
        train(net, optimizer, steps)
    return net, optimizer


def cached_plans(world: World, path: str) -> list[float]:
    """Save three times with a planner that sends no plan twice; return what each checkpoint has."""
    for number in range(3):
        state = {"w": torch.full((5,), float(number)), "each": torch.full((2,), float(number)), "n": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        torch_dcp.save(state, storage_writer=dcp.HoldfastWriter(f"{path}-{number}"), planner=planner)
    into = [{"w": torch.zeros(5), "each": torch.zeros(2), "n": -1} for _ in range(3)]
    for number, state in enumerate(into):
        dcp.load(state, checkpoint_id=f"{path}-{number}")
        assert state["n"] == number
        assert state["each"].tolist() == [number, number]
    return [float(state["w"][0]) for state in into]


class _FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        raise RuntimeError("this rank's disk is gone")


def one_rank_fails(world: World, path: str, by_verb: bool) -> dict[str, object]:
    """Have rank 1 fail in `write_data`; return what this rank met, what is left, and what a second save has."""
    state = {"w": torch.ones(4), "v": torch.ones(4), "n": 1}
    planner = _FailingPlanner() if world.rank == 1 else DefaultSavePlanner()
    writer = dcp.HoldfastWriter(path)
    error = ""
    try:
        if by_verb:
            dcp.save(state, storage_writer=writer, planner=planner)
        else:
            torch_dcp.save(state, storage_writer=writer, planner=planner)
    except CheckpointException as failure:
        error = str(failure.failures[1][0])
    dist.barrier()
    left = sorted(each.name for each in Path(path).rglob("*") if each.is_file())
    is_visible = (Path(path) / "manifest.json").exists()
    dist.barrier()
    torch_dcp.save(state, storage_writer=dcp.HoldfastWriter(path))
    folders = [each.name for each in Path(path).iterdir() if len(each.name) == 16]
    return {"error": error, "left": left, "visible": is_visible, "folders": len(folders)}


def coordinator_dies(world: World, path: str) -> str:
    """Kill rank 0 after all ranks have written, before the manifest."""
    if world.rank == 0:
        at = wiring.store_at
        faults = Faults(kill_process(), names=("sync",))
        wiring.store_at = lambda path, settings: FaultyStore(at(path, settings), faults)
    try:
        dcp.save({"w": torch.ones(4), "v": torch.ones(4)}, checkpoint_id=path)
    except Exception as error:
        return type(error).__name__
    return ""


def load_plain(path: str | Path) -> dict[str, str]:
    """Load into a plain model and its optimizer by `holdfast.load`, in this process; return every digest."""
    net = plain(3)
    optimizer = adamw(net)
    report = holdfast.load(path, {"model": net, "optimizer": optimizer}, process_group=False)
    assert report.missing == report.unexpected == ()
    return digests(net, optimizer)
