"""Frozen parts, optimizers that have not stepped, state of odd shapes, schedulers and scalers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import holdfast
from tests.distributed.matrix import models
from tests.distributed.matrix.holding import digests_of, group_of, over, refusal_of
from tests.support.gloo_worlds import World


def _partly_frozen(layout: str, seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = models.net(seed)
    for name, each in model.named_parameters():
        each.requires_grad_(name.startswith(("head", "experts")))
    wrapped = over(model, layout)
    return wrapped, torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=0.05)


def save_frozen(world: World | None, path: str, layout: str, steps: Sequence[int]) -> dict[str, str]:
    model, optimizer = _partly_frozen(layout, 1)
    models.train(model, optimizer, steps)
    holdfast.save(path, {"model": model, "optimizer": optimizer}, process_group=group_of(world))
    return digests_of(model, optimizer)


def load_frozen(world: World | None, path: str, layout: str) -> dict[str, str]:
    model, optimizer = _partly_frozen(layout, 2)
    holdfast.load(path, {"model": model, "optimizer": optimizer}, process_group=group_of(world))
    found = digests_of(model, optimizer)
    models.train(model, optimizer, [3])
    return found


class Factored(torch.optim.Optimizer):
    """State shaped unlike the parameter, made from its gradient as `torch.optim.Adafactor` does.

    Adafactor itself cannot step DTensors in torch 2.13: a norm over a sharded dimension fails there.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, _ in models.members(self):
            gradient, state = parameter.grad, self.state[parameter]
            if gradient is None:
                continue
            if gradient.ndim < 2:
                state.setdefault("variance", torch.zeros_like(gradient)).add_(gradient.square())
                continue
            if not state:
                shape = list(gradient.shape)
                state["row"] = gradient.new_zeros([*shape[:-1], 1])
                state["column"] = gradient.new_zeros([*shape[:-2], 1, shape[-1]])
            state["row"] = state["row"] * 0.9 + gradient.square().sum(-1, keepdim=True)
            column = gradient.square().sum(-2, keepdim=True)
            if isinstance(column, DTensor):
                column = column.redistribute(placements=[Replicate()] * column.device_mesh.ndim)
            state["column"] = state["column"] * 0.9 + column
            parameter.add_(gradient * (state["row"] * state["column"] + 1).rsqrt(), alpha=-0.01)


class LocalRows(torch.optim.Optimizer):
    """State made of this rank's rows alone, whose layout nothing tells."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, _ in models.members(self):
            assert isinstance(parameter.grad, DTensor)
            self.state[parameter]["rows"] = parameter.grad.to_local().square().sum(-1, keepdim=True) + dist.get_rank()


def _muon(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if each.ndim != 2]
    return {"muon": torch.optim.Muon(matrices, lr=0.01), "adamw": torch.optim.AdamW(rest, lr=0.05)}


def _optimizers(kind: str, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if kind == "muon":
        return _muon(model)
    if kind == "adafactor":
        return {"adafactor": torch.optim.Adafactor(parameters, lr=0.01)}
    return {"factored": Factored(parameters)}


def _train_all(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], steps: Sequence[int]) -> None:
    for number in steps:
        model.zero_grad()
        model(models.batch(number)).square().sum().backward()
        for each in optimizers.values():
            each.step()


def save_optimizer(world: World | None, path: str, kind: str, layout: str) -> dict[str, object]:
    model = over(models.net(1), layout)
    optimizers = _optimizers(kind, model)
    _train_all(model, optimizers, [1, 2])
    holdfast.save(path, {"model": model, **optimizers}, process_group=group_of(world))
    return {"digests": [digests_of(model, each) for each in optimizers.values()]}


def load_optimizer(world: World | None, path: str, kind: str, layout: str, stepped: bool) -> dict[str, object]:
    model = over(models.net(2), layout)
    optimizers = _optimizers(kind, model)
    if stepped:
        _train_all(model, optimizers, [9])
    holdfast.load(path, {"model": model, **optimizers}, process_group=group_of(world))
    found = [digests_of(model, each) for each in optimizers.values()]
    _train_all(model, optimizers, [3])
    return {"digests": found}


def refuse_local_rows(world: World, path: str) -> str:
    model = over(models.net(1), "fsdp2")
    optimizer = LocalRows(list(model.parameters()))
    model(models.batch(1)).square().sum().backward()
    optimizer.step()
    return refusal_of(lambda: holdfast.save(path, {"model": model, "optimizer": optimizer}))


def _scheduled(layout: str, seed: int) -> dict[str, object]:
    model = over(models.net(seed), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def _said(state: Mapping[str, object]) -> dict[str, object]:
    scheduler, scaler, optimizer = state["scheduler"], state["scaler"], state["optimizer"]
    assert isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(optimizer, torch.optim.Optimizer)
    values = {key: value for key, value in scheduler.state_dict().items() if isinstance(value, int | float)}
    return {"scheduler": values, "scaler": scaler.state_dict(), "lr": optimizer.param_groups[0]["lr"]}


def save_scheduled(world: World, path: str, layout: str) -> dict[str, object]:
    state = _scheduled(layout, 1)
    model, optimizer, scheduler, scaler = state.values()
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    for number in (1, 2):
        optimizer.zero_grad()
        scaler.scale(model(models.batch(number)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    holdfast.save(path, state)
    return _said(state)


def load_scheduled(world: World, path: str, layout: str) -> dict[str, object]:
    state = _scheduled(layout, 2)
    holdfast.load(path, state)
    return _said(state)
