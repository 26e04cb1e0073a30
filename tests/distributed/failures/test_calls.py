"""Calls that one rank of two makes, or makes wrong.

Within seconds the log of a rank that calls alone names the other, and both go on once that calls. A call of save that
is wrong on one rank raises on both. Both save over one path again and again.
"""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_worlds

ABSENT = {
    "manager": ("ranks [1] did not call CheckpointManager(...)", 0),
    "save by path": ("ranks [1] did not call save(path, state)", 0),
    "save": ("save of step 1: ranks [1] did not call save", 0),
    "load of a manager": ("ranks [1] did not call load", 0),
    "load by path": ("ranks [0] did not call load", 1),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("calls")
    late = Case("tests.distributed.failures.call_cases:late_calls", {"root": str(root)}, "calls")
    wrong = Case("tests.distributed.failures.call_cases:wrong_calls", {"root": str(root)}, "wrong")
    overwrites = Case("tests.distributed.failures.call_cases:overwrites", {"root": str(root)}, "overwrites")
    return run_worlds(2, [[late, wrong, overwrites]], root / "world", deadline_seconds=150)["calls"]


@pytest.fixture(scope="module")
def values(results: Results) -> list[dict]:  # type: ignore[type-arg]
    found = results.values("calls")
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


def test_a_call_that_is_wrong_on_one_rank_raises_the_same_on_both(results: Results) -> None:
    first, second = results.values("wrong")
    assert first == second
    assert isinstance(first, dict) and first["steps"] == [1, 20]
    expected = {
        "save": "save(step, state): state is NoneType; expected a dict",
        "negative step": "step='-2' (int); expected a whole number from 0",
        "maybe_save": "maybe_save(step, state): state is list; expected a dict",
        "save by path": "save(path, state): state is list; expected a dict",
        "path": "path is int; expected a folder as str or Path",
    }
    assert list(first["raised"]) == list(expected)
    for name, texts in first["raised"].items():
        for rank, text in enumerate(texts):
            assert f"rank {rank} refused: {expected[name]}" in text, text
        assert len(texts) == 2, texts


def test_two_processes_save_over_one_path(results: Results) -> None:
    first, second = results.values("overwrites")
    assert first == second and isinstance(first, dict)
    assert first["loaded"] == [[3, 3.0], [6, 6.0]] and first["attempts"] == 2


def test_one_that_overwrites_and_one_that_does_not_are_refused_together(results: Results) -> None:
    (first, _) = results.values("overwrites")
    assert isinstance(first, dict) and len(first["raised"]) == 2
    for overwriting, text in enumerate(first["raised"]):
        assert f"ranks [{overwriting}] pass overwrite=True and ranks [{1 - overwriting}] do not" in text
