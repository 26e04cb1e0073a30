"""Steps of each optimizer are carried out again with equal bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.recorded_training import Training, log_of, redo

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "sgd-nesterov-foreach": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "sgd-fused": ("SGD", {"lr": 0.05, "fused": True}),  # With momentum, torch 2.13 takes no late first gradient.
    "adam-amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "adam-fused": ("Adam", {"lr": 0.01, "amsgrad": True, "fused": True}),
    "adamw-foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
    "adamw-tensor-lr": ("AdamW", {"lr": torch.tensor(0.01), "foreach": False}),
    "adamw-fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "nadam-foreach": ("NAdam", {"lr": 0.01, "foreach": True}),
    "radam": ("RAdam", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1}),
    "adagrad-fused": ("Adagrad", {"lr": 0.05, "fused": True}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
    "asgd-foreach": ("ASGD", {"lr": 0.05, "foreach": True}),
    "adafactor": ("Adafactor", {"lr": 0.05}),
    "muon": ("Muon", {"lr": 0.05}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: on a busy machine, threads wait for each other far longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def training_of(variant: str) -> Training:
    name, hyperparameters = VARIANTS[variant]
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return Training(lambda groups: kind(groups, **copy.deepcopy(hyperparameters)), matrices=name == "Muon")


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_records_lead_to_equal_bits_at_each_boundary_and_after_it(variant: str, every: int) -> None:
    training = training_of(variant)
    training.train()
    log = log_of(training.state(), step=1)
    bases, bits = {1: copy.deepcopy(training)}, {}
    for step in range(2, 14):
        training.train()
        if (step - 1) % every == 0:
            assert log.boundary(step, training.state()) is not None, log.capture.interrupted
            bits[step] = training.bits()
            bases[step] = copy.deepcopy(training)
    training.train()
    after = training.bits()
    steps = sorted(bits)
    for base, last in ((1, steps[0]), (1, steps[-1]), (steps[1], steps[-1])):
        records = [each for each in log.records if base < each.record.step <= last]
        resumed = copy.deepcopy(bases[base])
        torch.manual_seed(99)
        state = resumed.state()
        assert redo(state, records) == []
        resumed.step, resumed.values = last, state["values"]
        assert_equal(resumed.bits(), bits[last])
    resumed.train()
    assert_equal(resumed.bits(), after)


def assert_equal(present: object, expected: object) -> None:
    torch.testing.assert_close(present, expected, rtol=0, atol=0, equal_nan=True)
