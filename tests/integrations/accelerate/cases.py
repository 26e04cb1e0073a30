"""What two real processes do under Accelerate and FSDP2, for `test_accelerate.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import holdfast
from tests.integrations.accelerate.on_cpu import shard, sharding_plugin
from tests.support.gloo_worlds import World

if TYPE_CHECKING:
    from holdfast.integrations.accelerate import Accelerator


def sharded_hooks(world: World, folder: str) -> dict[str, object]:
    """Save under FSDP2 with and without a hook; return what hooks saw, whether weights were gathered, and names."""
    accelerator, *_ = prepared(world)
    gathered: list[bool] = []
    gather = accelerator.get_state_dict
    accelerator.get_state_dict = lambda *args, **more: (gathered.append(True), gather(*args, **more))[1]
    accelerator.save_state(Path(folder) / "without")
    before = len(gathered)
    seen: dict[str, object] = {}

    def take(models: list[Any], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        if accelerator.is_main_process:
            whole = [type(each) is torch.Tensor for each in weights[0].values()]
            seen.update(shapes={name: list(each.shape) for name, each in weights[0].items()}, whole=all(whole))
            weights.pop()

    accelerator.register_save_state_pre_hook(take)
    accelerator.save_state(Path(folder) / "with")
    names = {each: sorted(holdfast.open_checkpoint(Path(folder) / each).tensors) for each in ("without", "with")}
    return {"before": before, "after": len(gathered), "seen": seen, "names": names}


def compiled_shards(world: World, folder: str) -> dict[str, object]:
    """Save a model that is compiled and sharded; load it into a plain one."""
    accelerator, model = prepared(world, compiled=True)
    accelerator.save_state(folder)
    plain = net()
    torch.nn.init.zeros_(plain[0].weight)
    holdfast.load(folder, {"model": plain}, process_group=False)
    whole = next(model.parameters()).full_tensor()
    names = [name for name in holdfast.open_checkpoint(folder).tensors if name.startswith("model.")]
    return {"equal": torch.equal(plain[0].weight, whole), "names": names}


def flat_shards(world: World, folder: str) -> dict[str, object]:
    """Save and load under FSDP1, with a model that the script wraps itself: Accelerate's way needs a GPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerator = begun(world, version=1)
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))

    def step(number: int) -> float:
        loss = model(torch.full((2, 4), float(number + world.rank))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(0)
    accelerator.save_state(folder)
    first = [step(number) for number in (1, 2)]
    accelerator.load_state(folder)
    names = [name for name in holdfast.open_checkpoint(folder).tensors if name.startswith("model.")]
    return {"alike": first == [step(number) for number in (1, 2)], "names": names}


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def begun(world: World, *, version: int = 2) -> Accelerator:
    """Return an Accelerator that takes itself for one that shards over this world."""
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    from accelerate.state import AcceleratorState, GradientState

    from holdfast.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = sharding_plugin("Linear", version=version)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    shard(accelerator, plugin)
    return accelerator


def prepared(world: World, *, compiled: bool = False) -> tuple[Accelerator, torch.nn.Module]:
    """Return an Accelerator, and a model over whose parameters an optimizer has state."""
    accelerator, model = begun(world), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if compiled:
        model = torch.compile(model, backend="eager")
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model
