"""Errors of collectives are errors of Holdfast, and name the rank that reports them."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Launch

LATE = ["load, late", "manager, late"]
DEAD = ["load", "manager", "load of a manager", "first save by path"]
COLLECTIVES = ["broadcast", "all_gather", "bitwise_or", "exchange"]


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cases = [Case("tests.distributed.failures.absent_rank_cases:beside_an_absent_rank")]
    with Launch(2, cases, tmp_path_factory.mktemp("absent")) as launch:
        launch.processes[0].wait(60.0)
        lines = (launch.scratch / "raised").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("call", LATE + DEAD + COLLECTIVES)
def test_a_call_beside_an_absent_rank_raises_what_a_script_catches(raised: dict[str, str], call: str) -> None:
    text = raised[call]
    assert text.startswith("UnavailableError: rank 0: a collective of Holdfast ("), text
    assert ") over 2 ranks failed: " in text and "restart the job" in text
    assert not call.endswith("late") or "imed out" in text
