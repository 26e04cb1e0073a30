"""The bench of activations: its keys, its exit status, its models, and the ways they train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bench.activations import __main__ as activations
from bench.activations import slowdowns
from bench.activations.models import Training
from bench.activations.parts import ACTIVATION_PARTS
from bench.activations.race import KEEP, Race
from bench.goals import GOALS
from bench.part import Measured, Params, Part

RACE = {"keep_all": 1.0, "keep_all_again": 1.0, "full": 1.25, "selective": 1.2}
PLANS = {"ours_62": 1.01, "ours_42": 1.1, "ours_as_full": 1.25, "ours_as_selective": 1.2}
EXACT = {**RACE, **PLANS, "fit_steps": 20.0, **{f"predicted_slowdown_{name}": 1.02 for name in PLANS}}
EXACT |= {
    "predicted_slowdown_ours_42": 1.1,
    "predicted_slowdown_ours_as_full": 1.25,
    "predicted_slowdown_ours_as_selective": 1.2,
}
BOUNDED = {
    **RACE,
    "ours_e02_at_42": 1.02,
    "ours_e25_at_38": 1.03,
    "error_per_bound_e02": 0.3,
    "error_per_bound_e25": 0.4,
}
ROUNDS: dict[str, dict[str, float]] = {
    "peaks": {"predicted_gpt": 1.0, "measured_gpt": 1.0, "error": 0.001, "over": 0.0},
    "exact": EXACT,
    "exact_modern": EXACT,
    "bounded": BOUNDED,
    "packs": {"q8_ratio": 3.91, "q4_ratio": 7.65, "worst": 0.999},
    "solver": {"seconds": 0.8},
    "hooks": {"keep_all": 1.0, "keep_all_again": 1.0, "hooks": 1.008},
    "loss": {"plain_1": 2.0, "plain_2": 2.1, "plain_3": 1.9, "e02": 2.01, "e25": 2.1},
}
"""What one round of each part may have measured."""


def run(part: Part, params: Params, folder: Path, variables: Mapping[str, str]) -> Measured:
    assert params == part.quick and variables == activations.MEMORY
    return Measured([ROUNDS[part.name]] * (1 if part.name == "loss" else 7), [])


def test_every_part_measures_the_keys_that_are_listed_for_it() -> None:
    assert set(activations.KEYS) == set(ACTIVATION_PARTS) == set(ROUNDS)
    for name, part in ACTIVATION_PARTS.items():
        assert set(part.keys([ROUNDS[name]], {})) == set(activations.KEYS[name]) <= {goal.key for goal in GOALS}


def test_rounds_become_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert activations.main(["--quick", "--json", str(path), "--folder", str(tmp_path)], run=run) == 0
    found = json.loads(path.read_text())
    assert (found["overhead_e0_at_62"], found["overhead_e0_at_42"], found["overhead_e02_at_42"]) == (0.04, 0.4, 0.08)
    assert (found["slowdown_vs_sac"], found["loss_change_e25"], found["gradient_error_per_bound"]) == (1.0, 0.5, 0.4)
    assert found["slowdown_error_p95"] == pytest.approx(0.0085)


def test_a_budget_that_no_plan_fits_is_a_missed_key(tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> Measured:
        return Measured([{name: value for name, value in EXACT.items() if "as_full" not in name}], [])

    command = ["--quick", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path), "--only", "exact"]
    assert activations.main(command, run=refused) == 1


def test_a_prediction_may_be_off_by_the_noise_of_plain_training() -> None:
    latest: dict[str, object] = {"slowdown_error_p95": 0.08, "slowdown_error_of_plain": 0.03}
    assert not activations.is_any_missed(latest, ["slowdown_error_p95"])
    assert activations.is_any_missed({**latest, "slowdown_error_of_plain": 0.01}, ["slowdown_error_p95"])


@pytest.mark.parametrize("kind", ["gpt", "modern"])
def test_every_way_trains_the_same_model(kind: str) -> None:
    """Plans and eager rivals have the gradients of plain training to the bit, and peaks of the order one expects."""
    torch.set_num_threads(1)
    race = Race(Training(kind, {"width": 256, "blocks": 3, "tokens": 32}))
    race.add_rivals("full", "selective", "every_second_matmul", "save_on_cpu")
    race.fitted("ours", race.keep_all_bytes * 95 // 100)
    peaks = {name: way.peak_bytes for name, way in race.ways.items()}
    assert not any(way.gradients_error for way in race.ways.values())
    assert peaks["full"] < peaks["every_second_matmul"] < peaks["selective"] < peaks[KEEP]
    assert peaks["full"] < peaks["ours"] < peaks[KEEP]
    assert peaks["save_on_cpu"] >= 0.99 * peaks[KEEP]
    (each,) = race.rounds(1)
    assert slowdowns.slowdown_errors([each]).keys() == {"ours"}
