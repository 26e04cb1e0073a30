"""On real ranks, each optimizer goes on from the log with the bits of the training that was never killed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.crash.redo_log.every_optimizer import LAYOUTS
from tests.support.gloo_worlds import Case, Results, run_world
from tests.support.redo_log.optimizer_variants import VARIANTS

pytestmark = pytest.mark.long

CASES = "tests.crash.redo_log.every_optimizer"

REFUSED = {
    ("fsdp2", "sgd-fused"): "NotImplementedError: Operator aten._fused_sgd_.default does not have a sharding strategy",
    ("fsdp2", "adagrad-fused"): "NotImplementedError: Operator aten._fused_adagrad_.default does not have a sharding",
    ("fsdp2", "rprop"): "RuntimeError: aten.index_put_.default: in-place operations that require placement changes",
    ("fsdp2", "adafactor"): "RuntimeError: aten.pow_.Scalar: in-place operations that require placement changes",
}
"""The error of torch, by layout and variant: DTensor cannot step so (torch 2.13)."""


@dataclass(frozen=True)
class Ended:
    """The two jobs of one layout."""

    layout: str
    killed: Results
    resumed: Results


@pytest.fixture(scope="module", params=LAYOUTS)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run all variants in one job that is killed, and in one job that goes on."""
    layout, folder = request.param, tmp_path_factory.mktemp(request.param)

    def cases(name: str) -> list[Case]:
        return [
            Case(f"{CASES}:{name}", {"layout": layout, "variant": variant, "root": str(folder / variant)}, variant)
            for variant in VARIANTS
            if name == "abandon" or (layout, variant) not in REFUSED
        ]

    killed = run_world(2, [*cases("abandon"), Case(f"{CASES}:killed")], folder / "killed")
    assert killed.exits == [-9, -9], killed.logs()
    return Ended(layout, killed, run_world(2, cases("resume"), folder / "resumed"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_training_ends_with_the_bits_of_the_whole_one(ended: Ended, variant: str) -> None:
    refusal = REFUSED.get((ended.layout, variant))
    if refusal is not None:
        for outcome in ended.killed.of(variant):
            assert f"{outcome.error}: {outcome.message}".startswith(refusal)
        return
    for dead, again in zip(ended.killed.values(variant), ended.resumed.values(variant), strict=True):
        if dead is None:
            pytest.skip(f"torch {torch.__version__} has no {VARIANTS[variant][0]}")
        assert isinstance(dead, dict) and isinstance(again, dict)
        stop = dead["stop"]
        assert (again["start"], again["redone"], again["why"]) == (stop, stop - 1, ""), ended.resumed.logs()
        differing = [name for name, digest in dead["bits"].items() if again["bits"].get(name) != digest]
        assert differing == []
        assert again["bits"].keys() == dead["bits"].keys()
