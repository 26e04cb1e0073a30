"""Any rank of two real ones cancels a save, early and late: it ends on both, and nothing of it stays on storage."""

from __future__ import annotations

import pytest

from tests.support.gloo_worlds import Case, Results, run_world

MODULE = "tests.distributed.saves.cancel_cases"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("cancel")
    cases = [
        Case(f"{MODULE}:{when}", {"root": str(root / f"{when}-{rank}"), "cancels": rank}, f"{when}-{rank}")
        for when in ("early", "late")
        for rank in (0, 1)
    ]
    return run_world(2, cases, root / "world")


@pytest.mark.parametrize("cancels", (0, 1))
@pytest.mark.parametrize(("when", "reason"), [("early", "a newer step is better"), ("late", "the loss is no number")])
def test_a_save_that_one_rank_cancels_ends_on_both(results: Results, when: str, reason: str, cancels: int) -> None:
    for rank, value in enumerate(results.values(f"{when}-{cancels}")):
        assert isinstance(value, dict)
        assert value["result"] is (True if rank == cancels else None)
        assert f"save of step 1: cancelled: {reason}" in value["said"], value
        assert rank == cancels or f"rank {cancels} aborted: " in value["said"]
        assert value["left"] == []
        if when == "early":
            assert not value["staged"] and value["steps"] == [2]
        else:
            assert value["again"] is False and value["steps"] == []
