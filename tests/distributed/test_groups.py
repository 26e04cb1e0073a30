"""Saves by path leave behind what one job needs, however many groups and settings they had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import Case, Results, run_world

ROUNDS = 9
JOBS_MAX = 4


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = [
        Case(f"tests.distributed.group_cases:{name}", {"rounds": ROUNDS})
        for name in ("groups_come_and_go", "settings_of_many_kinds")
    ]
    return run_world(2, cases, tmp_path_factory.mktemp("groups"))


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
