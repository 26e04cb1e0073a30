"""What ranks do in the tests of starting from another run: renamed and resized under FSDP2, and wrong calls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.support.gloo_worlds import World


def net(body: str, vocabulary: int, seed: int, shards: int) -> tuple[nn.ModuleDict, torch.optim.AdamW]:
    """A model under FSDP2, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(vocabulary, 6), body: nn.Linear(6, 6)})
    mesh = dist.init_device_mesh("cpu", (shards,))
    for child in model.values():
        fully_shard(child, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def whole(tensor: object) -> torch.Tensor:
    assert isinstance(tensor, torch.distributed.tensor.DTensor)
    return tensor.full_tensor().detach()


def renamed_and_resized(world: World, path: str) -> list[bool]:
    """Load a sharded run into one of another name and vocabulary, by exchange; return what is as it should be."""
    old, optimizer = net("backbone", 10, 0, world.size)
    for parameter in old.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) * (1 + parameter.detach())
    optimizer.step()
    holdfast.save(path, {"model": old, "optimizer": optimizer})
    right = []
    for vocabulary in (13, 7):
        model, new = net("trunk", vocabulary, 1, world.size)
        before = whole(model["embed"].weight).clone()
        report = holdfast.load(
            path,
            {"model": model, "optimizer": new},
            rename={"backbone": "trunk"},
            partial={"model.embed.weight"},
            hyperparameters=False,
            settings=holdfast.Settings(share_reads="always"),
        )
        both = min(vocabulary, 10)
        weight, saved = model["embed"].weight, old["embed"].weight
        moment = whole(new.state[weight]["exp_avg"])
        right += [
            torch.equal(whole(weight)[:both], whole(saved)[:both]),
            torch.equal(whole(weight)[both:], before[both:]),
            torch.equal(moment[:both], whole(optimizer.state[saved]["exp_avg"])[:both]),
            not moment[both:].any(),
            torch.equal(whole(model["trunk"].weight), whole(old["backbone"].weight)),
            report.partial[0].filled == (both, 6) and new.param_groups[0]["lr"] == 0.5,
        ]
    return right


def different_rules(world: World, path: str) -> str:
    """Pass another rename on each rank; return the error."""
    holdfast.save(path, {"w": {"a": torch.ones(2), "b": torch.ones(2)}})
    try:
        holdfast.load(path, {"w": {"x": torch.ones(2)}}, rename={"ab"[world.rank]: "x"}, strict=False)
    except holdfast.InvalidError as error:
        return str(error)
    return "loaded"
