"""Units under columns train as plain ones do on two ranks, and the ranks of a fit hold one plan or one error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gloo_worlds import Case, Outcome, Results, run_world
from tests.unit.activations.runtime.parity import STEPS

WAYS = (
    *("ddp", "ddp-static", "ddp-autocast", "ddp-accumulated"),
    *("fsdp2", "fsdp2-mixed", "fsdp2-autocast", "fsdp2-accumulated"),
)
FITS = (
    "ddp-static before", "ddp-accumulated after",
    "fsdp2 before", "fsdp2-accumulated after", "fsdp2-autocast after",
)  # fmt: skip
FIT = "tests.distributed.jobs.fit_cases:"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    function = "tests.distributed.jobs.activation_cases:random_columns"
    cases = [Case(function, {"way": way}, way) for way in WAYS]
    return run_world(2, cases, tmp_path_factory.mktemp("activations"), deadline_seconds=15 * STEPS)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_equal_those_of_plain_training(results: Results, way: str) -> None:
    assert results.values(way) == [True, True]


@pytest.fixture(scope="module")
def quick_fits(tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = [Case(f"{FIT}fitted", {"way": "ddp", "steps": 3}, "ddp after")]
    cases += [Case(f"{FIT}disagreeing", {"what": what}, what) for what in ("batch", "argument", "collective")]
    cases.append(Case(f"{FIT}fitted_around_shards"))
    arguments = {"error": "ValueError", "calls": 2, "is_late": True}
    cases.append(Case(f"{FIT}failing", arguments, "late"))
    return run_world(2, cases, tmp_path_factory.mktemp("fits"))


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = []
    for name in FITS:
        way, when = name.split()
        cases.append(Case(f"{FIT}fitted", {"way": way, "steps": 20, "when": when}, name))
    cases.append(Case(f"{FIT}fitted", {"way": "fsdp2", "steps": 3, "when": "unwrapped"}, "fsdp2 unwrapped"))
    cases += [Case(f"{FIT}disagreeing", {"what": what}, what) for what in ("model", "units", "budget")]
    arguments = {"error": "KeyboardInterrupt", "calls": 5, "is_late": True}
    cases.append(Case(f"{FIT}failing", arguments, "interrupted"))
    cases.append(Case(f"{FIT}without_a_rank"))
    # Rank 0 is in a collective of its step when rank 1 leaves: the group's timeout ends the wait.
    arguments = {"error": "ValueError", "calls": 2, "is_late": False, "seconds": 3.0}
    cases.append(Case(f"{FIT}failing", arguments, "early"))
    return run_world(2, cases, tmp_path_factory.mktemp("long-fits"), deadline_seconds=300)


def assert_fitted(found: list[Any], calls: int) -> None:
    """Check a fit on all ranks: one plan, nothing left, a peak within the budget, and the training of the plan."""
    assert len({each["plan"] for each in found}) == 1
    for each in found:
        assert each["is_left"] and each["is_equal"]
        assert f"{calls} calls as planned, 0 of other signatures" in each["report"]
        assert each["peak"] <= 1


def test_two_ranks_fit_one_plan_within_the_budget_of_each(quick_fits: Results) -> None:
    assert_fitted(quick_fits.values("ddp after"), 3 * 3)


@pytest.mark.long
@pytest.mark.parametrize("name", FITS)
def test_training_under_the_plan_of_all_ranks_equals_plain_training(fits: Results, name: str) -> None:
    calls = (4 if "accumulated" in name else 1) * 20 * 3
    assert_fitted(fits.values(name), calls)


@pytest.mark.long
def test_a_plan_of_a_model_that_is_sharded_later_holds_for_its_units(fits: Results) -> None:
    for each in fits.values("fsdp2 unwrapped"):
        assert each["is_left"] and each["is_equal"]  # type: ignore[index]
        assert "9 calls as planned, 0 of other signatures" in each["report"]  # type: ignore[index]


def outcomes(results: Results, name: str) -> tuple[Outcome, Outcome]:
    first, second = results.of(name)
    return first, second


def test_ranks_that_disagree_raise_the_same_error(quick_fits: Results) -> None:
    for first, second in (outcomes(quick_fits, "batch"), outcomes(quick_fits, "collective")):
        assert (first.error, second.error) == ("InvalidError", "InvalidError")
        assert first.message in second.message
    first, second = outcomes(quick_fits, "batch")
    assert first.message.startswith("rank 1: unit blocks.0, op 0 input with 16,384 bytes; expected unit blocks.0")
    assert "blocks.0: the unit runs a collective (c10d.allreduce_" in outcomes(quick_fits, "collective")[0].message


def test_a_unit_with_modules_that_are_sharded_apart_is_refused_by_name(quick_fits: Results) -> None:
    for outcome in quick_fits.of("fitted_around_shards"):
        assert outcome.error == "InvalidError" and "unit blocks.0: contains blocks.0.up, which" in outcome.message


def test_a_bad_argument_of_one_rank_is_raised_on_all(quick_fits: Results) -> None:
    first, second = outcomes(quick_fits, "argument")
    assert (first.error, second.error) == ("InvalidError", "InvalidError")
    assert second.message.startswith("budget=0.7: expected") and first.message == f"rank 1: {second.message}"


def test_a_step_that_fails_on_one_rank_fails_the_fit_of_all(quick_fits: Results) -> None:
    first, second = outcomes(quick_fits, "late")
    assert (first.error, second.error) == ("InvalidError", "ValueError")
    assert first.message.startswith("rank 1: ValueError: no batch")


@pytest.mark.long
def test_a_step_that_leaves_others_in_a_collective_fails_them_at_the_timeout(fits: Results) -> None:
    first, second = outcomes(fits, "early")
    assert (first.error, second.error) == ("InvalidError", "ValueError")
    assert first.message.startswith("rank 1: ValueError: no batch")


@pytest.mark.long
def test_other_ranks_learn_of_an_interrupt(fits: Results) -> None:
    first, second = outcomes(fits, "interrupted")
    assert (first.error, second.error) == ("UnavailableError", "KeyboardInterrupt")
    assert first.message.startswith("rank 1: interrupted by KeyboardInterrupt")


@pytest.mark.long
def test_other_models_and_units_are_refused_and_the_smallest_budget_counts(fits: Results) -> None:
    expected = {
        "model": "rank 1: unit blocks.1 of class 1; expected unit blocks.1 of class 0, as on rank 0",
        "units": "rank 1: unit blocks.0, op 0 input with 32,768 bytes; expected unit blocks.1 of class 0",
    }
    for name, message in expected.items():
        for outcome in fits.of(name):
            assert outcome.error == "InvalidError" and message in outcome.message
    assert fits.values("budget") == [700_000, 700_000]


@pytest.mark.long
def test_a_rank_alone_fits_without_the_others_or_learns_that_they_are_absent(fits: Results) -> None:
    assert "expected every rank to take part" in str(fits.values("without_a_rank")[0])


@pytest.mark.long
def test_three_ranks_that_add_in_another_order_at_first_fit(tmp_path: Any) -> None:
    cases = [Case(f"{FIT}fitted_by_many", {"static_graph": each}, str(each)) for each in (False, True)]
    results = run_world(3, cases, tmp_path)
    for case in cases:
        assert len({*results.values(case.key())}) == 1
