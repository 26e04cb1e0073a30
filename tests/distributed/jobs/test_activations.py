"""Units under columns train as plain ones do on two ranks, whose columns differ."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

WAYS = ("ddp", "ddp-static", "ddp-autocast", "fsdp2", "fsdp2-mixed", "fsdp2-autocast")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    function = "tests.distributed.jobs.activation_cases:random_columns"
    cases = [Case(function, {"way": way}, way) for way in WAYS]
    return run_world(2, cases, tmp_path_factory.mktemp("activations"))


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_equal_those_of_plain_training(results: Results, way: str) -> None:
    assert results.values(way) == [True, True]
