"""Tied parameters: in one module, under every wrapper, and across pipeline stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import holdfast
from tests.distributed.matrix import models
from tests.distributed.matrix.holding import clean, group_of, over
from tests.support.gloo_worlds import World
from tests.support.small_networks import digest


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def _tied_state(layout: str, seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = over(tied(seed), layout)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train_tied(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in (1, 2):
        optimizer.zero_grad()
        model(models.batch(number) % 7).square().sum().backward()
        optimizer.step()


def save_tied(world: World | None, path: str, layout: str) -> dict[str, object]:
    model, optimizer = _tied_state(layout, 1)
    _train_tied(model, optimizer)
    holdfast.save(path, {"model": model, "optimizer": optimizer}, process_group=group_of(world))
    return {"names": sorted(holdfast.open_checkpoint(path).tensors), "model": _tied_digests(model)}


def load_tied(world: World | None, path: str, layout: str) -> dict[str, object]:
    model, optimizer = _tied_state(layout, 2)
    holdfast.load(path, {"model": model, "optimizer": optimizer}, process_group=group_of(world))
    found = _tied_digests(model)
    _train_tied(model, optimizer)
    return {"model": found}


def _tied_digests(model: nn.Module) -> dict[str, str]:
    return {
        clean(name): digest(models.whole(each)) for name, each in model.state_dict().items() if isinstance(each, Tensor)
    }


def _stage(rank: int, seed: int) -> nn.Module:
    """Return this rank's stage of the tied model: each keeps a copy of the shared weight under its own name."""
    model = tied(seed)
    if rank == 0:
        del model.head
    else:
        weight = nn.Parameter(model.embed.weight.detach().clone())
        model.head.weight = weight
        del model.embed
    return model


def _stage_state(rank: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _stage(rank, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def save_tied_stages(world: World, path: str) -> dict[str, str]:
    """The shared weight gets the sum of both stages' gradients, as pipelines with tied embeddings do."""
    model, optimizer = _stage_state(world.rank, 1)
    if world.rank == 1:
        del model.middle
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    models.step_with_made_up_gradients(list(model.parameters()), optimizer, [1, 2])
    holdfast.save(path, {"model": model, "optimizer": optimizer})
    return models.of_module(model, optimizer)


def load_tied_stages(world: World, path: str) -> dict[str, str]:
    model, _ = _stage_state(world.rank, 2)
    if world.rank == 1:
        del model.middle
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    holdfast.load(path, {"model": model, "optimizer": optimizer})
    return models.of_module(model, optimizer)


def save_untied_stages(world: World, path: str) -> str:
    """The two copies have come apart."""
    model = _stage(world.rank, 1 + world.rank)
    if world.rank == 1:
        del model.middle
    holdfast.save(path, {"model": model})
    return ""
