"""Starting from another run on two ranks under FSDP2: other names, another vocabulary, and calls that differ."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_worlds

CASES = ("renamed_and_resized", "different_rules")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("another_run")
    cases = [
        Case(f"tests.distributed.loads.another_run_cases:{name}", {"path": str(root / name)}, name) for name in CASES
    ]
    return run_worlds(2, [cases], root / "world", deadline_seconds=150)[CASES[0]]


def test_sharded_weights_and_moments_are_bit_exact(results: Results) -> None:
    assert results.values("renamed_and_resized") == [[True] * 12] * 2


def test_ranks_with_different_rules_are_refused_alike(results: Results) -> None:
    first, second = results.values("different_rules")
    assert first == second
    assert "rank 0 rename={'a': 'x'}, rank 1 rename={'b': 'x'}; expected the same rename" in str(first)
