"""What differs by rank: patterns that some stage matches, and values, buffers and objects of each rank's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

CASES = "tests.distributed.layouts.differs_cases"


def case(function: str, root: Path, name: str = "", **arguments: object) -> Case:
    return Case(f"{CASES}:{function}", {"path": str(root / function), **arguments}, name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("differs")
    cases = [
        case("patterns_by_stage", root),
        case("glob_that_matches_nothing", root),
        *(case("root_unseen_by_one", root, f"unseen-by-{rank}", blind=rank) for rank in (0, 1)),
        case("root_of_a_new_run", root),
        case("run_without_steps", root),
        case("what_differs", root),
        case("each_ranks_own", root),
        case("drifted", root),
    ]
    return run_world(2, cases, root, deadline_seconds=150)


def test_a_pattern_is_refused_if_no_stage_of_a_pipeline_has_a_name_for_it(results: Results) -> None:
    first, second = results.values("patterns_by_stage")
    assert isinstance(first, dict) and isinstance(second, dict)
    for said in (first, second):
        assert said["one stage"] == said["other by rank"] == said["all"] == "done"
        assert (
            said["no stage"].startswith("InvalidError") and "only='model.layer7': matches no name" in said["no stage"]
        )
        assert "model.layer1" not in said["no stage"]
        assert "skip='model.layer7': matches no name on any rank" in said["skip"]
        assert "only='modle.layer1': matches no name on any rank" in said["load of none"]
    assert (first["load of one"], second["load of one"]) == ("done 0", "done 4")


def test_a_glob_that_matches_nothing_is_logged_once_by_rank_0(results: Results) -> None:
    first, second = results.values("glob_that_matches_nothing")
    assert isinstance(first, list) and len(first) == 1 and "skip='modle.*' matches no name on any rank" in first[0]
    assert second == []


def test_a_root_that_rank_0_alone_does_not_see_is_unavailable(results: Results) -> None:
    values = results.values("unseen-by-0")
    for value in values:
        assert isinstance(value, dict)
        said, host = value["said"], value["host"]
        assert said.startswith("UnavailableError")
        assert f"rank 0 on host {host} finds no run, but ranks [1] on hosts [{host}] find one" in said
        assert value["sum"] == 0
    assert [value["left"] for value in values] == [False, True]  # type: ignore[index]


def test_a_root_that_another_rank_does_not_see_is_no_start_from_scratch(results: Results) -> None:
    for value in results.values("unseen-by-1"):
        assert isinstance(value, dict)
        assert value["said"].startswith("UnavailableError") and "expected that rank 1 can read them" in value["said"]


def test_a_root_without_a_run_has_no_step(results: Results) -> None:
    assert results.values("root_of_a_new_run") == [None, None]


def test_a_run_that_rank_0_sees_without_a_step_has_none(results: Results) -> None:
    assert results.values("run_without_steps") == [[None, True], [None, True]]


@pytest.mark.parametrize(
    ("kind", "named"), [("buffer", "x.qweight"), ("loader", "x"), ("rng", "x")], ids=["buffer", "loader", "rng"]
)
def test_what_would_be_lost_is_refused_on_every_rank(results: Results, kind: str, named: str) -> None:
    for value in results.values("what_differs"):
        assert isinstance(value, dict)
        assert value[kind].startswith("InvalidError: save: tensors or objects differ between ranks"), value[kind]
        assert f": {named} (ranks [0] ≠ ranks [1])." in value[kind]
        for words in ("holdfast.PerRank", "holdfast.RngState()", "holdfast.Sharded", "DTensor", "skip="):
            assert words in value[kind]
        assert value[f"{kind} logged"] == []


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("metric", ["x.counts", "x.total"]),
        ("module metric", ["x.accuracy.counts", "x.accuracy.total"]),
        ("norm", ["x.running_mean", "x.running_var"]),
        ("value", ["x.seed"]),
    ],
    ids=["metric", "module metric", "norm", "value"],
)
def test_what_differs_in_ordinary_runs_is_logged_by_rank_0(results: Results, kind: str, named: list[str]) -> None:
    first, second = results.values("what_differs")
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first[kind] == second[kind] == "done"
    assert second[f"{kind} logged"] == []
    texts = first[f"{kind} logged"]
    differs = "differs between ranks (ranks [0] ≠ ranks [1]): only that of rank 0 is saved."
    expected = [f"save: {name} {differs}" for name in named]
    assert [text.partition(" If each rank")[0] for text in texts] == expected


def test_what_is_declared_to_differ_comes_back_on_every_rank(results: Results) -> None:
    assert results.values("each_ranks_own") == [[1000, 0, True, []], [1001, 1, True, []]]


def test_replicas_that_drift_are_refused_or_saved_from_the_lowest_rank(results: Results) -> None:
    first, second = results.values("drifted")
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["refuse"] == second["refuse"] and "Settings(replicas='lowest')" in first["refuse"]
    assert first["loaded"] == second["loaded"]
    names = [
        *(f"model.{name}" for name in ("bias", "weight")),
        *(f"optimizer.state.{name}.{key}" for name in ("bias", "weight") for key in ("exp_avg", "exp_avg_sq")),
    ]
    assert set(first["divergent"]) <= set(names) and "optimizer.state.weight.exp_avg_sq" in first["divergent"]
    assert first["marked"] == second["marked"] == first["divergent"]
    (text,) = first["logged"]
    assert "replicated tensors differ between ranks" in text and second["logged"] == []
