"""Ranks that disagree, stay away or fail while all live: every rank hears the truth, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faulty_run import GRACE_SECONDS, PATIENT, TIMEOUT_SECONDS
from tests.support.gloo_worlds import Case, Results, run_worlds

CASES = "tests.distributed.failures.fault_cases"
STORE_FAULTS = {
    "first write": ("upload.write", ""),
    "a pack completed": ("upload.complete", ""),
    "its part": ("put_if_absent", "/parts/"),
}


def case(function: str, name: str, root: Path, **arguments: object) -> Case:
    return Case(f"{CASES}:{function}", {"root": str(root / name), **arguments}, name)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Worlds by the names of their cases: those that mostly wait for a rank, and one for the others, at a time."""
    root = tmp_path_factory.mktemp("absences")
    waiting = [
        [
            case("one_never_calls", f"absent-{rank}", root, absent=rank),
            case("one_calls_late", f"late-{rank}", root, late=rank),
        ]
        for rank in (0, 1)
    ]
    others = [
        case("skewed_steps", "skewed", root),
        case("skewed_paths", "paths", root),
        case("all_refuse_at_once", "all-refuse", root),
        case("one_is_beyond_the_format", "beyond", root),
        *(case("one_cannot_give_its_state", f"stateless-{rank}", root, failing=rank) for rank in (0, 1)),
        *(
            case("one_store_fails", f"store-{rank}-{number}", root, failing=rank, operation=name, ending=ending)
            for number, (name, ending) in enumerate(STORE_FAULTS.values())
            for rank in (0, 1)
        ),
        case("publishing_fails", "unpublished", root, after=False),
        case("publishing_fails", "reply-lost", root, after=True),
        case("two_saves_in_flight", "in-flight", root),
        case("connections_break", "broken", root),
        # Last: it replaces torch.distributed's functions, the launcher's own barrier among them.
        case("saving_runs_no_collective", "no-collective", root),
    ]
    return run_worlds(2, [*waiting, others], root, deadline_seconds=150)


def dicts(worlds: dict[str, Results], name: str) -> list[dict]:  # type: ignore[type-arg]
    values = worlds[name].values(name)
    assert all(isinstance(value, dict) for value in values)
    return values  # type: ignore[return-value]


def test_skewed_steps_are_refused_on_every_rank_naming_ranks_and_steps(worlds: dict[str, Results]) -> None:
    for value in dicts(worlds, "skewed"):
        assert value["skewed"]["error"] == "InvalidError"
        assert "step 10 on ranks [0]" in value["skewed"]["message"]
        assert "step 11 on ranks [1]" in value["skewed"]["message"]
        assert value["after"]["said"] == "committed", value["after"]
        assert value["steps"] == [20]


def test_skewed_paths_are_refused_on_every_rank(worlds: dict[str, Results]) -> None:
    for said in worlds["paths"].values("paths"):
        assert isinstance(said, str)
        assert "[1]" in said and "path" in said


def test_a_wrong_state_on_every_rank_leaves_them_counting_together(worlds: dict[str, Results]) -> None:
    for value in dicts(worlds, "all-refuse"):
        assert [each["error"] for each in value["refused"]] == ["InvalidError", "InvalidError"]
        assert value["after"]["said"] == "committed", value["after"]
        assert value["steps"] == [3]


def test_a_tensor_that_no_index_may_list_is_refused_by_name_on_every_rank(worlds: dict[str, Results]) -> None:
    for value in dicts(worlds, "beyond"):
        assert value["refused"]["error"] == "InvalidError"
        assert "t: 65 dimensions; expected at most 64" in value["refused"]["message"]
        assert value["after"]["said"] == "committed", value["after"]
        assert value["steps"] == [2]


def test_connections_that_break_between_two_saves_cost_no_save_and_no_wait(worlds: dict[str, Results]) -> None:
    values = dicts(worlds, "broken")
    assert values[1]["broken"] >= 1
    for value in values:
        assert [each["said"] for each in value["found"]] == ["committed"] * 3, value
        assert value["waited"] < PATIENT.commit_timeout_seconds / 2, value
        assert value["steps"] == [1, 2, 3]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_calls_save_fails_the_others_within_the_timeout(
    worlds: dict[str, Results], absent: int
) -> None:
    values = dicts(worlds, f"absent-{absent}")
    lonely = values[1 - absent]["lonely"]
    assert (lonely["said"], lonely["error"]) == ("aborted", "UnavailableError"), lonely
    assert f"[{absent}]" in lonely["message"] or f"rank {absent}" in lonely["message"]
    for value in values:
        assert value["after"]["said"] == "committed", value["after"]
        assert value["again"]["said"] == "committed", value["again"]
        assert value["steps"] == [6, 7]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_calls_late_joins_when_the_save_is_tried_again(worlds: dict[str, Results], late: int) -> None:
    values = dicts(worlds, f"late-{late}")
    assert values[1 - late]["first"]["said"] == "aborted", values[1 - late]
    for value in values:
        assert value["retried"]["said"] == "committed", value["retried"]
        assert value["after"]["said"] == "committed", value["after"]
        assert value["steps"] == [5, 6]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_state_raises_ends_the_save_on_every_rank_at_once(
    worlds: dict[str, Results], failing: int
) -> None:
    for rank, value in enumerate(dicts(worlds, f"stateless-{failing}")):
        assert value["failed"]["said"] == "aborted", value["failed"]
        assert "no state today" in value["failed"]["message"]
        if rank != failing:
            assert f"rank {failing}" in value["failed"]["message"]
        assert value["waited"] < PATIENT.commit_timeout_seconds / 2, "nobody waits for a rank that said no"
        assert value["after"]["said"] == "committed", value["after"]
        assert value["steps"] == [2]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("number", range(len(STORE_FAULTS)), ids=list(STORE_FAULTS))
def test_a_rank_whose_store_fails_aborts_the_save_on_every_rank(
    worlds: dict[str, Results], failing: int, number: int
) -> None:
    values = dicts(worlds, f"store-{failing}-{number}")
    assert values[failing]["met"] >= 1
    for rank, value in enumerate(values):
        assert value["first"]["said"] == "committed"
        assert (value["failed"]["said"], value["failed"]["error"]) == ("aborted", "UnavailableError"), value["failed"]
        if rank != failing:
            assert f"rank {failing}" in value["failed"]["message"]
        assert value["left"] == [], "the failed attempt's files are removed"
        assert value["after"]["said"] == "committed", value["after"]
        assert value["steps"] == [1, 2]


def test_a_failure_before_publishing_is_known_to_have_left_nothing(worlds: dict[str, Results]) -> None:
    values = dicts(worlds, "unpublished")
    assert sum(value["met"] for value in values) >= 1
    for value in values:
        assert value["failed"]["said"] == "aborted", value["failed"]
        assert value["next"]["said"] == "committed", value["next"]
        assert value["steps"] == [1, 3]


def test_a_reply_lost_in_the_act_of_publishing_is_never_called_an_abort(worlds: dict[str, Results]) -> None:
    values = dicts(worlds, "reply-lost")
    assert sum(value["met"] for value in values) >= 1
    for value in values:
        assert value["failed"]["said"] in ("unknown", "committed"), value["failed"]
        assert value["next"]["said"] == "committed", value["next"]
        assert value["steps"] == [1, 2, 3]


def test_saves_begun_one_after_the_other_all_commit(worlds: dict[str, Results]) -> None:
    for value in dicts(worlds, "in-flight"):
        assert value["said"] == [True] * 4
        assert value["steps"] == [1, 2, 3, 4]


def test_saving_runs_no_collective(worlds: dict[str, Results]) -> None:
    for value in dicts(worlds, "no-collective"):
        assert value["forbidden"] == "aborted", "the test must forbid collectives"
        assert value["said"] == ["committed"] * 3, value["messages"]
        assert value["ran"] == []


def test_every_failure_came_within_the_timeout_and_its_grace(worlds: dict[str, Results]) -> None:
    said = [
        each
        for name in ("skewed", "absent-0", "absent-1", "late-0", "late-1", "stateless-0", "stateless-1")
        for value in dicts(worlds, name)
        for each in value.values()
        if isinstance(each, dict) and "said" in each
    ]
    assert len(said) > 15
    assert not [each for each in said if each["said"] == "late"], (TIMEOUT_SECONDS, GRACE_SECONDS)
