"""The kinds of training that need no package but torch resume to the same loss, or say what to pass instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.errors import InvalidError
from tests.everyday.kinds import Build, Training, batch, network, resume, supervised


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def plain() -> Training:
    model = network()
    return supervised(model, adamw(model))


def loss_scaling() -> Training:
    model = network()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    schedule = schedules.OneCycleLR(optimizer, 0.01, 50)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (model(batch(number)) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss.item() + scaler.get_scale()

    return Training({"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}, step)


def averaged() -> Training:
    training = plain()
    model = training.state["model"]
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def step(number: int) -> float:
        training.step(number)
        ema.update_parameters(model)
        return float(ema(batch(number)).sum().detach())

    return Training({**training.state, "ema": ema}, step)


def averaged_by_hand() -> Training:
    training = plain()
    model = training.state["model"]
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def step(number: int) -> float:
        training.step(number)
        for name, parameter in model.named_parameters():
            shadow[name].lerp_(parameter.detach(), 0.1)
        return float(sum(value.sum() for value in shadow.values()).detach())

    return Training({**training.state, "ema": shadow}, step)


def with_a_target_network() -> Training:
    training = plain()
    target = copy.deepcopy(training.state["model"]).requires_grad_(False)

    def step(number: int) -> float:
        return training.step(number) + float(target(batch(number)).sum().detach())

    return Training({**training.state, "target": target}, step)


def compiled() -> Training:
    model = torch.compile(network(), backend="eager")
    return supervised(model, adamw(model))


def compiled_in_place() -> Training:
    model = network()
    model.compile(backend="eager")
    return supervised(model, adamw(model))


def adversarial() -> Training:
    made, judged = network(0), network(1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.999)) for model in (made, judged)]

    def step(number: int) -> float:
        optimizers[1].zero_grad()
        (judged(batch(number)).mean() - judged(made(batch(number)).detach()).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = judged(made(batch(number))).square().mean()
        loss.backward()
        optimizers[0].step()
        return loss.item()

    state = {"netG": made, "netD": judged, "optimizers": optimizers, "epoch": 3, "fixed_noise": batch(99)}
    return Training(state, step)


def _two_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[int], float]]:
    model = network()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]

    def step(number: int) -> float:
        model.zero_grad()
        loss = (model(batch(number)) - 1).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return model, optimizers, step


def optimizers_in_a_list() -> Training:
    model, optimizers, step = _two_optimizers()
    return Training({"model": model, "optimizers": optimizers}, step)


def optimizers_in_a_dict() -> Training:
    model, (muon, other), step = _two_optimizers()
    return Training({"model": model, "optimizers": {"muon": muon, "adamw": other}}, step)


def second_order() -> Training:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(number: int) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch(number)) - 1).square().mean()
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    return Training({"model": model, "optimizer": optimizer}, step)


def frozen() -> Training:
    model = network()
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return supervised(model, torch.optim.AdamW(trained, lr=1e-2))


def tied() -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    return supervised(model, adamw(model))


def normalised() -> Training:
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    second = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8))
    model = nn.Sequential(first, nn.ReLU(), second)
    return supervised(model, adamw(model))


def channels_last() -> Training:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 4)), *layers, nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    return supervised(model, adamw(model))


def complex_buffers() -> Training:
    model = network()
    model.register_buffer("frequencies", torch.polar(torch.ones(4), torch.arange(4.0)))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    return supervised(model, adamw(model))


def learning_rate_as_a_tensor() -> Training:
    model = network()
    return supervised(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False))


def state_dicts() -> Training:
    training = plain()
    model, optimizer = training.state["model"], training.state["optimizer"]
    state: dict[str, Any] = {}

    def collected() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def step(number: int) -> float:
        loss = training.step(number)
        state.update(collected())
        return loss

    def loaded() -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    state.update(collected())
    return Training(state, step, loaded)


def temperature() -> Training:
    alpha = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([alpha], lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = (alpha.exp() * (number + 1)).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training({"log_alpha": alpha, "optimizer": optimizer}, step)


def groups_with_an_empty_one() -> Training:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    groups = [
        {"params": [model.weight], "lr": 0.1, "name": "decay", "lr_scale": 0.5},
        {"params": [], "lr": 0.7, "name": "empty"},
        {"params": [model.bias], "lr": 0.01, "name": "no_decay", "fn": None},
    ]
    optimizer = torch.optim.AdamW(groups)
    training = supervised(model, optimizer)

    def step(number: int) -> float:
        optimizer.param_groups[1]["lr"] *= 0.5
        return training.step(number) + optimizer.param_groups[1]["lr"]

    return Training(training.state, step)


@pytest.mark.parametrize(
    "build",
    [
        plain, loss_scaling, averaged, averaged_by_hand, with_a_target_network, compiled, compiled_in_place,
        adversarial, optimizers_in_a_list, optimizers_in_a_dict, second_order, frozen, tied, normalised, channels_last,
        complex_buffers, learning_rate_as_a_tensor, temperature, groups_with_an_empty_one,
    ],
)  # fmt: skip
def test_a_kind_resumes_to_the_same_loss(tmp_path: Path, build: Build) -> None:
    resume(tmp_path, build)


def test_state_dicts_resume_to_the_same_loss_by_their_objects(tmp_path: Path) -> None:
    training = state_dicts()
    for number in range(3):
        training.step(number)
    holdfast.save(tmp_path / "c", training.state, process_group=False)
    expected = [training.step(number) for number in range(3, 6)]
    objects = plain()
    holdfast.load(tmp_path / "c", objects.state, process_group=False)
    assert [objects.step(number) for number in range(3, 6)] == expected
    # The dict of an optimizer without state may be replaced only if asked for: others may hold it.
    again = state_dicts()
    with pytest.raises(InvalidError, match="pass the optimizer itself"):
        holdfast.load(tmp_path / "c", again.state, process_group=False)
    holdfast.load(tmp_path / "c", again.state, strict=False, process_group=False)
    again.loaded()
    assert [again.step(number) for number in range(3, 6)] == expected


class _Decay:
    """A schedule that is an object, so that its state dict has its attributes."""

    def __init__(self) -> None:
        self.factor = 0.9

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycle": lambda o: schedules.OneCycleLR(o, 0.1, 50),
    "Lambda of a function": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "Lambda of an object": lambda o: schedules.LambdaLR(o, _Decay()),
    "Sequential": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.CosineAnnealingLR(o, 10)], [2]),
    "Chained": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)]),
    "Plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "Cyclic": lambda o: schedules.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "Restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "SWA": lambda o: SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(tmp_path: Path, name: str) -> None:
    def build() -> Training:
        model = network()
        optimizer = adamw(model)
        schedule = SCHEDULES[name](optimizer)
        training = supervised(model, optimizer, schedule=schedule)

        def step(number: int) -> float:
            loss = training.step(number)
            if isinstance(schedule, schedules.ReduceLROnPlateau):
                schedule.step(loss)
            else:
                schedule.step()
            return loss

        return Training(training.state, step)

    resume(tmp_path, build)


def test_an_optimizer_without_its_module_is_refused_by_name(tmp_path: Path) -> None:
    training = plain()
    with pytest.raises(InvalidError, match=r"optimizer: parameter 0 .*Pass the module in the same call"):
        holdfast.save(tmp_path / "c", {"optimizer": training.state["optimizer"]}, process_group=False)
    model = network()
    model.log_alpha = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([model.log_alpha, *model.parameters()])
    with pytest.raises(
        InvalidError, match=r"parameter 0 of group 0, shape \(1,\), belongs to no module.*the tensor itself"
    ):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer}, process_group=False)
    state = {"model": model, "log_alpha": model.log_alpha, "optimizer": optimizer}
    holdfast.save(tmp_path / "c", state, process_group=False)


def test_a_best_model_that_is_none_in_the_new_process_is_named(tmp_path: Path) -> None:
    training = plain()
    best = {"loss": 0.5, "model": copy.deepcopy(training.state["model"].state_dict())}
    holdfast.save(tmp_path / "c", {**training.state, "best": best}, process_group=False)
    with pytest.raises(InvalidError, match=r"best\.model is a dict or list of tensors .* and None here: pass one"):
        holdfast.load(tmp_path / "c", {**plain().state, "best": {"loss": 0.0, "model": None}}, process_group=False)
    fresh: dict[str, Any] = {"loss": 0.0, "model": network(1).state_dict()}
    holdfast.load(tmp_path / "c", {**plain().state, "best": fresh}, process_group=False)
    assert fresh["loss"] == 0.5 and torch.equal(fresh["model"]["0.weight"], best["model"]["0.weight"])
