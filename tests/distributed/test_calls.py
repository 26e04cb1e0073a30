"""Calls that one rank of two makes: within seconds its log names the other rank, and both go on once that calls."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Case, run_worlds

ABSENT = {
    "manager": ("ranks [1] did not call CheckpointManager(...)", 0),
    "save by path": ("ranks [1] did not call save(path, state)", 0),
    "save": ("save of step 1: ranks [1] did not call save", 0),
    "load of a manager": ("ranks [1] did not call load", 0),
    "load by path": ("ranks [0] did not call load", 1),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:  # type: ignore[type-arg]
    root = tmp_path_factory.mktemp("calls")
    case = Case("tests.distributed.call_cases:late_calls", {"root": str(root)}, "calls")
    found = run_worlds(2, [[case]], root / "world", deadline_seconds=150)["calls"].values("calls")
    assert all(isinstance(value, dict) for value in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("call", ABSENT)
def test_a_rank_that_calls_alone_logs_who_is_absent(values: list[dict], call: str) -> None:  # type: ignore[type-arg]
    text, first = ABSENT[call]
    # More may follow: the first save by path makes a job, then it agrees.
    line = values[first]["logged"][call][0]
    assert text in line and f"of rank {first}; expected all 2 ranks. Every rank must call it" in line
    assert "if rank == 0:" in line


def test_the_calls_end_once_every_rank_has_made_them(values: list[dict]) -> None:  # type: ignore[type-arg]
    assert [value["steps"] for value in values] == [[1], [1]]


def test_a_rank_closes_its_manager_without_the_others(values: list[dict]) -> None:  # type: ignore[type-arg]
    assert [value["closed"] for value in values] == [True, True]
