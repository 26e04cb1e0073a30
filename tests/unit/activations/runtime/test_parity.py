"""Training under columns that change every ten steps leaves the parameters, moments and buffers of plain training."""

from __future__ import annotations

import pytest

from tests.unit.activations.runtime.parity import STEPS, Made, Network, digests


def made() -> Made:
    model = Network()
    return model, model


@pytest.mark.long
@pytest.mark.parametrize("way", ["plain", "autocast", "accumulated"])
def test_all_state_equals_that_of_plain_training(way: str) -> None:
    plain = digests(made, way, is_planned=False)
    assert digests(made, way, is_planned=True) == plain
    assert len(set(plain)) == STEPS
