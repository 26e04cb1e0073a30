"""Saves by path leave behind what one job needs, however many groups and settings they had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

ROUNDS = 9
JOBS_MAX = 4


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = [
        Case(f"tests.distributed.saves.group_cases:{name}", {"rounds": ROUNDS})
        for name in ("groups_come_and_go", "settings_of_many_kinds")
    ]
    return run_world(2, cases, tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    cases = [Case("tests.distributed.saves.group_cases:random_states_of_other_numbers")]
    return run_world(3, cases, tmp_path_factory.mktemp("random")).values(cases[0].key())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("loads", "numbers", "what"),
    [
        ("all to pair", "3 at the save, 2 now", "the saved random states of rank 2 are not used"),
        ("all to one", "3 at the save, 1 now", "the saved random states of ranks 1 to 2 are not used"),
        ("one to all", "1 at the save, 3 now", "the random generators of ranks 1 to 2 are seeded anew"),
        ("one to pair", "1 at the save, 2 now", "the random generators of rank 1 are seeded anew"),
    ],
)
def test_rank_0_says_what_becomes_of_random_states(
    said: list[dict[str, list[str]]], loads: str, numbers: str, what: str
) -> None:
    lines = said[0][loads]
    assert sorted(line.partition(":")[0] for line in lines) == ["more.rng", "rng"]
    assert all(f"rng: number of ranks: {numbers}: {what}" in line for line in lines)
    assert not any(each.get(loads) for each in said[1:])


@pytest.mark.parametrize("loads", ["all to all", "one to one"])
def test_random_states_of_as_many_ranks_need_no_word(said: list[dict[str, list[str]]], loads: str) -> None:
    assert [each[loads] for each in said if each.get(loads)] == []


def held(ended: Results, case: str) -> list[list[dict[str, Any]]]:
    return ended.values(case)  # type: ignore[return-value]


def test_a_group_that_is_gone_leaves_nothing_of_its_job(ended: Results) -> None:
    for rounds in held(ended, "groups_come_and_go"):
        assert rounds[-1]["jobs"] == 0, rounds
        assert rounds[-1]["connections"] <= rounds[0]["connections"], rounds
        # Two a job; those of the last jobs may be about to end.
        assert rounds[-1]["threads"] < ROUNDS, rounds


def test_jobs_of_other_settings_share_threads_and_connections(ended: Results) -> None:
    for rounds in held(ended, "settings_of_many_kinds"):
        assert [each["jobs"] for each in rounds] == [min(number + 1, JOBS_MAX) for number in range(ROUNDS)], rounds
        assert {each["connections"] for each in rounds[1:]} == {rounds[0]["connections"]}, rounds
        assert {each["threads"] for each in rounds[1:]} == {rounds[0]["threads"]}, rounds
