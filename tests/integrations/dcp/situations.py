"""What PyTorch's own tests of DCP's storage try, made again on four ranks with our writer and reader."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.errors import InvalidError
from holdfast.integrations import dcp
from tests.distributed.foreign.dcp_cases import even
from tests.support.gloo_worlds import World
from tests.support.small_networks import adamw, digest, digests, sharded, train

WHOLE = torch.arange(63, dtype=torch.float32).view(9, 7)
"""Lengths that no number of ranks divides."""

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "grid": ((2, 2), [Shard(0), Shard(1)]),
    "both on rows": ((2, 2), [Shard(0), Shard(0)]),
    "replicated rows": ((2, 2), [Replicate(), Shard(0)]),
    "replicas": ((4,), [Replicate()]),
}


def layouts(world: World, path: str) -> int:
    """Save a DTensor in each layout, and load it in every other one."""
    for name, (shape, placements) in LAYOUTS.items():
        mesh = init_device_mesh("cpu", shape)
        dcp.save({"w": distribute_tensor(WHOLE.clone(), mesh, placements)}, checkpoint_id=f"{path}-{name}")
    pairs = 0
    for name in LAYOUTS:
        for shape, placements in LAYOUTS.values():
            into: Any = {"w": zeros(9, 7, device_mesh=init_device_mesh("cpu", shape), placements=placements)}
            dcp.load(into, checkpoint_id=f"{path}-{name}")
            assert torch.equal(into["w"].full_tensor(), WHOLE)
            pairs += 1
    return pairs


def sharded_tensors(world: World, path: str) -> None:
    """Save a `ShardedTensor` by rows, load it by columns, and into a plain tensor."""
    specs = [
        ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in range(world.size)])  # type: ignore[arg-type]
        for dim in (0, 1)
    ]
    saved = sharded_tensor.rand(specs[0], 8, 12)
    dcp.save({"w": saved}, checkpoint_id=path)
    other = sharded_tensor.zeros(specs[1], 8, 12)
    dcp.load({"w": other}, checkpoint_id=path)
    plain = {"w": torch.zeros(8, 12)}
    dcp.load(plain, checkpoint_id=path)
    for shards, dim in ((saved.local_shards(), 0), (other.local_shards(), 1)):
        for shard in shards:
            start = shard.metadata.shard_offsets[dim]
            assert torch.equal(shard.tensor, plain["w"].narrow(dim, start, shard.tensor.shape[dim]))
    saving: Any = dcp.async_save({"w": saved}, checkpoint_id=f"{path}-async")
    saving.result()
    dcp.load(again := {"w": torch.zeros(8, 12)}, checkpoint_id=f"{path}-async")
    assert torch.equal(again["w"], plain["w"])


def fsdp1(world: World, path: str) -> None:
    """Save the sharded state dict of FSDP1, and load it into another model of FSDP1."""
    warnings.simplefilter("ignore")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = FullyShardedDataParallel(even(), device_id=torch.device("cpu"), use_orig_params=True)
        with FullyShardedDataParallel.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
            state = {"model": net.state_dict()}
            if seed == 1:
                dcp.save(state, checkpoint_id=path)
            else:
                dcp.load(state, checkpoint_id=path)
                net.load_state_dict(state["model"])
        with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT):
            found.append({name: digest(tensor) for name, tensor in net.state_dict().items()})
    assert found[0] == found[1]


def hybrid(world: World, path: str) -> None:
    """Save under HSDP, load under FSDP2 over all ranks, and the other way round."""
    meshes = {
        "hsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "fsdp2": init_device_mesh("cpu", (4,)),
    }
    for one, other in (("hsdp", "fsdp2"), ("fsdp2", "hsdp")):
        net = sharded(1, meshes[one])
        optimizer = adamw(net)
        train(net, optimizer)
        expected = digests(net, optimizer)
        model, optim = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": optim}, checkpoint_id=f"{path}-{one}")
        net = sharded(2, meshes[other])
        optimizer = adamw(net)
        train(net, optimizer, 1)
        model, optim = get_state_dict(net, optimizer)
        dcp.load({"model": model, "optimizer": optim}, checkpoint_id=f"{path}-{one}")
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
        assert digests(net, optimizer) == expected


def tensor_parallel(world: World, path: str) -> None:
    """Save under FSDP2 with tensor parallelism, load into a plain model and under FSDP2 alone."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = even()
    parallelize_module(net, grid["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=grid["data"])
    expected = digests(net)
    dcp.save({"model": net.state_dict()}, checkpoint_id=path)
    for other in (even(), fully_shard(even())):
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        dcp.load(state := {"model": other.state_dict()}, checkpoint_id=path)
        other.load_state_dict(state["model"])
        assert digests(other) == expected


def fine_tuning(world: World, path: str) -> None:
    """Load what a new model shares with a saved one; its new head stays."""
    net = sharded(1)
    dcp.save({"model": net.state_dict()}, checkpoint_id=path)
    expected = digests(net)
    other = sharded(2)
    other.head = nn.Linear(5, 9)
    head = other.head.weight.detach().clone()
    state = {"model": {name: value for name, value in other.state_dict().items() if not name.startswith("head")}}
    dcp.load(state, checkpoint_id=path)
    found = digests(other)
    assert {name: found[name] for name in found if not name.startswith("head")} == {
        name: expected[name] for name in expected if not name.startswith("head")
    }
    assert torch.equal(other.head.weight, head)


class _Renaming(DefaultLoadPlanner):
    """Loads `old.` into `new.`, as DCP's documentation renames."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = state_dict
        self.state_dict = {name.replace("new.", "old."): value for name, value in state_dict.items()}
        self.mappings = {name: (name.replace("old.", "new."),) for name in self.state_dict}
        self.metadata, self.is_coordinator = metadata, is_coordinator


def renamed(world: World, path: str) -> None:
    """Load a tensor and a value under other names."""
    mesh = init_device_mesh("cpu", (4,))
    dcp.save({"old.w": distribute_tensor(WHOLE.clone(), mesh, [Shard(0)]), "old.n": 3}, checkpoint_id=path)
    into: Any = {"new.w": zeros(9, 7, device_mesh=mesh, placements=[Shard(1)]), "new.n": 0}
    dcp.load(into, checkpoint_id=path, planner=_Renaming())
    assert torch.equal(into["new.w"].full_tensor(), WHOLE)
    assert into["new.n"] == 3


def own_keys(world: World, path: str) -> None:
    """Ranks with different keys, as stages of a pipeline have, in an order of their own; some with nothing to write."""
    state: dict[str, Any] = {f"stage{world.rank}.w": torch.full((3,), float(world.rank)), "shared": torch.ones(2)}
    if world.rank % 2:
        state = dict(reversed(state.items()))
    dcp.save(state, checkpoint_id=path)
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(into, checkpoint_id=path)
    assert all(torch.equal(into[name], state[name]) for name in state)


def submesh(world: World, path: str) -> None:
    """A DTensor on two of four ranks: the others have no part of it."""
    group = dist.new_group([0, 1])
    state: dict[str, Any] = {"all": torch.ones(3)}
    if world.rank < 2:
        from torch.distributed.device_mesh import DeviceMesh

        state["part"] = DTensor.from_local(
            WHOLE[world.rank : world.rank + 1], DeviceMesh.from_group(group, "cpu"), [Shard(0)], run_check=False
        )
    dcp.save(state, checkpoint_id=path)
    dcp.load(into := {"part": torch.zeros(2, 7)}, checkpoint_id=path)
    assert torch.equal(into["part"], WHOLE[:2])


def groups(world: World, path: str) -> None:
    """A process group of two ranks saves and loads; the others do not call."""
    group = dist.new_group([0, 1])
    if world.rank < 2:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=path, process_group=group)
        dcp.load(into := {"w": torch.zeros(3)}, checkpoint_id=path, process_group=group)
        assert into["w"].tolist() == [1.0] * 3


def without_state(world: World, path: str) -> None:
    """Load without a state to fill, whole and by keys."""
    dcp.save(
        {"model": {"w": torch.ones(3), "b": torch.zeros(2)}, "lists": [1, {"a": torch.ones(1)}]}, checkpoint_id=path
    )
    reader = dcp.HoldfastReader(path)
    found = state_dict_loader._load_state_dict_from_keys(storage_reader=reader)
    assert sorted(found) == ["lists", "model"]
    assert found["lists"][0] == 1
    assert found["lists"][1]["a"].tolist() == [1.0]
    some = state_dict_loader._load_state_dict_from_keys("model.w", storage_reader=dcp.HoldfastReader(path))
    assert {name: list(value) for name, value in some.items()} == {"model": ["w"]}


class _Broken(dcp.HoldfastWriter):
    """Fails in one of the calls of a save, on one rank."""

    def __init__(self, path: str, call: str, here: bool) -> None:
        super().__init__(path)
        self._call, self._here = call, here

    def _meet(self, call: str) -> None:
        if self._here and call == self._call:
            raise ValueError(f"{call} was told to fail")

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        self._meet("set_up_storage_writer")
        super().set_up_storage_writer(*args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        self._meet("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self._meet("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._meet("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._meet("finish")
        super().finish(metadata, results)


def failures(world: World, path: str) -> dict[str, list[str]]:
    """Fail in each call, on the coordinator and on another rank; return what every rank met."""
    met: dict[str, list[str]] = {}
    calls = ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
    for call in calls:
        for failing in (0, 3) if call not in ("prepare_global_plan", "finish") else (0,):
            writer = _Broken(path, call, world.rank == failing)
            try:
                torch_dcp.save({"w": torch.ones(4), "n": 1}, storage_writer=writer)
            except CheckpointException as error:
                met[f"{call} on {failing}"] = [f"{rank}: {failure[0]}" for rank, failure in error.failures.items()]
            writer.close()
    return met


def in_a_process(world: World, path: str) -> None:
    """Save in a process of DCP's own."""
    state = {"w": torch.full((4,), 5.0), "n": 1}
    saving: Any = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    saving.result()
    dcp.load(into := {"w": torch.zeros(4), "n": 0}, checkpoint_id=path)
    assert (into["w"].tolist(), into["n"]) == ([5.0] * 4, 1)


def refused(world: World, path: str) -> dict[str, str]:
    """What is not taken, with the errors."""
    errors = {}
    attempts: dict[str, dict[str, Any]] = {
        "bytes": {"state_dict": {"b": io.BytesIO(b"x")}},
        "sparse": {"state_dict": {"s": torch.eye(2).to_sparse()}},
        "no collectives": {"state_dict": {"w": torch.ones(1)}, "use_collectives": False},
    }
    for name, arguments in attempts.items():
        try:
            dcp.save(checkpoint_id=path, **arguments)
        except (CheckpointException, InvalidError) as error:  # The first is no `Exception`, in torch.
            errors[name] = str(error)
        dist.barrier()
    return errors


def lowest_rank(world: World, path: str) -> None:
    """Replicated tensors from the lowest rank, as a planner may ask."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save({"a": torch.ones(3), "b": torch.ones(4)}, checkpoint_id=path, planner=planner)
