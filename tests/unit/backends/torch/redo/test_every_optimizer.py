"""Steps of each optimizer are carried out again with equal bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from tests.support.redo_log.optimizer_variants import VARIANTS, maker_of
from tests.support.redo_log.recorded_training import Training, log_of, redo


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: on a busy machine, threads wait for each other far longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def training_of(variant: str) -> Training:
    make = maker_of(variant)
    if make is None:
        pytest.skip(f"torch {torch.__version__} has no {VARIANTS[variant][0]}")
    return Training(make, matrices=variant == "muon")


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
