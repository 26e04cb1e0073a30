"""The states of every stock learning-rate scheduler and gradient scaler are values, with no torch object in them."""

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from holdfast.core.format.values.values import decode, dumps, encode, loads
from holdfast.errors import InvalidError
from tests.unit.core.format.values.sameness import assert_same


class Decay:
    """A callable object: schedulers keep its attributes in their state."""

    def __init__(self):
        self.rate = 0.9

    def __call__(self, epoch):
        return self.rate**epoch


SCHEDULERS = {
    "LRScheduler": None,  # abstract: it has no get_lr of its own
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Decay(), lambda epoch: 0.5**epoch]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, Decay()),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1])], [2]
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, mode="exp_range", gamma=0.9),
    "CyclicLR, own scale": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, scale_fn=Decay()),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "OneCycleLR, linear": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=10, anneal_strategy="linear", three_phase=True
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.01),
}


def make_optimizer(lr=0.1):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=lr, momentum=0.9)


def step(scheduler, times=4):
    for _ in range(times):
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(torch.tensor(1.0))
        else:
            scheduler.step()


def test_no_stock_scheduler_is_forgotten():
    assert {name.partition(",")[0] for name in SCHEDULERS} >= set(lr_scheduler.__all__)
    with pytest.raises(NotImplementedError):
        lr_scheduler.LRScheduler(make_optimizer())


@pytest.mark.parametrize("name", [name for name, make in SCHEDULERS.items() if make])
def test_stock_schedulers_round_trip_and_go_on_the_same(name):
    torch.manual_seed(7)
    optimizer = make_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    step(scheduler)
    state = scheduler.state_dict()
    found = decode(loads(dumps(encode(state, "scheduler"))), "scheduler")
    assert_same(found, state)

    other_optimizer = make_optimizer()
    other = SCHEDULERS[name](other_optimizer)
    other_optimizer.step()
    other.load_state_dict(found)
    for group, other_group in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        other_group.update({key: value for key, value in group.items() if key != "params"})
    step(scheduler, 3)
    step(other, 3)
    assert other.get_last_lr() == scheduler.get_last_lr()


def test_a_tensor_learning_rate_puts_tensors_into_the_scheduler_and_they_are_refused_here_by_path():
    optimizer = make_optimizer(torch.tensor(0.1))
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(InvalidError, match=r"^scheduler\.base_lrs\[0\]: a value of type torch\.Tensor"):
        encode(scheduler.state_dict(), "scheduler")


@pytest.mark.parametrize("enabled", [True, False])
def test_gradient_scalers_round_trip(enabled):
    scaler = torch.amp.GradScaler("cpu", enabled=enabled, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert bool(state) is enabled
    found = decode(loads(dumps(encode(state, "scaler"))), "scaler")
    assert_same(found, state)
    other = torch.amp.GradScaler("cpu", enabled=enabled)
    other.load_state_dict(found)
    assert_same(other.state_dict(), state)


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.float32, torch.Size([1]), torch.device("cpu")],
    ids=lambda value: type(value).__name__,
)
def test_torch_objects_are_refused_here(value):
    with pytest.raises(InvalidError, match=r"^x\.a: a value of type torch\."):
        encode({"a": value}, "x")
