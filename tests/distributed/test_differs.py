"""What differs by rank: patterns that some stage matches, and values, buffers and objects of each rank's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import Case, Results, run_world

CASES = "tests.distributed.differs_cases"


def case(function: str, root: Path, **arguments: object) -> Case:
    return Case(f"{CASES}:{function}", {"path": str(root / function), **arguments}, function)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("differs")
    cases = [
        case("patterns_by_stage", root),
        case("glob_that_matches_nothing", root),
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
