"""Ways to hold a model, and what it holds, as the cases of trainings need them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import InvalidError
from tests.distributed.matrix import models
from tests.support.gloo_worlds import World
from tests.support.small_networks import digest


def group_of(world: World | None) -> object:
    return None if world else False


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except InvalidError as error:
        return str(error)
    return ""


def over(model: nn.Module, layout: str) -> nn.Module:
    """Return a model under one of the ways to hold it."""
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if layout == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert layout == "one"
    return model


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def digests_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of parameters, and of state where it is not one of FSDP1's flat runs."""
    found = {
        clean(name): digest(models.whole(each)) for name, each in model.state_dict().items() if isinstance(each, Tensor)
    }
    names = {each: clean(name) for name, each in model.named_parameters()}
    runs: dict[str, Tensor] = {}
    for parameter, _ in models.members(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{names[parameter]}/{key}"
            if not parameter.numel():
                # FSDP1 left this rank nothing: a count made beforehand stands still and is nobody's.
                continue
            if isinstance(model, FullyShardedDataParallel) and value.ndim:
                runs[name] = value
            else:
                found[name] = digest(models.whole(value).reshape(-1))
    if isinstance(model, FullyShardedDataParallel):
        laid = models.laid_end_to_end(runs, model.process_group)
        found |= {name: digest(value) for name, value in laid.items()}
    return found
