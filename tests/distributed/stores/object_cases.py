"""What two ranks do with an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast._face import offline_api
from tests.support.gloo_worlds import World


def sharded(seed: int) -> DTensor:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.randn(64, 32), mesh, [Shard(0)])


def state_of(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    return {"sharded": sharded(seed), "frozen": torch.arange(50_000.0), "step": seed}


TRAINED = {"newest": [3, True], "chosen": [2, True], "best": [8, True], "dcp": True, "file": True}
"""What `trains` returns on each rank."""


def trains(world: World, url: str, variables: Mapping[str, str]) -> dict[str, object]:
    """Save steps, load the newest and an older one, overwrite a path, load other systems' files; return what came."""
    os.environ.update(variables)
    found: dict[str, object] = {}
    with holdfast.CheckpointManager(f"{url}/run", preemption=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step)).wait()
    state = state_of(0)
    with holdfast.CheckpointManager(f"{url}/run", preemption=False) as manager:
        found["newest"] = [manager.load(state), bool(torch.equal(_whole(state), sharded(3).full_tensor()))]
        found["chosen"] = [manager.load(state, step=2), bool(torch.equal(_whole(state), sharded(2).full_tensor()))]
    holdfast.save(f"{url}/best", state_of(7))
    holdfast.save(f"{url}/best", state_of(8), overwrite=True)
    holdfast.load(f"{url}/best", state)
    found["best"] = [state["step"], bool(torch.equal(_whole(state), sharded(8).full_tensor()))]
    if world.rank == 0:
        for to in ("dcp", "safetensors"):
            offline_api.export(f"{url}/run", f"{url}/{to}", to=to, step=3, model_only=False)
    dist.barrier()
    for name, path in (("dcp", "dcp"), ("file", "safetensors/model.safetensors")):
        state = {name: value for name, value in state_of(0).items() if name != "step"}
        # A file of Hugging Face holds a model.
        holdfast.load(f"{url}/{path}", {"model": state} if name == "file" else state, strict=False)
        found[name] = bool(torch.equal(_whole(state), sharded(3).full_tensor()))
    return found


def _whole(state: Mapping[str, object]) -> torch.Tensor:
    tensor = state["sharded"]
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()
