"""Lazy saves on real gloo processes, under each kind of layout: what is saved is the state of the call, or nothing."""

from __future__ import annotations

import pytest

from tests.distributed.matrix.layouts import KINDS
from tests.support.gloo_worlds import Case, Results, run_world

MODULE = "tests.distributed.saves.lazy_cases"
LAZY = ["ddp", "fsdp1", "fsdp2-2", "tp", "sp", "pp", "ep", "zero", "tp-fsdp2"]
KINDS_OF_RANKS = {kind: KINDS[kind].ranks for kind in LAZY}
CHANGED = ["ddp", "fsdp2-2", "tp"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Run each layout, in one world for each number of ranks."""
    root = tmp_path_factory.mktemp("lazy")
    found: dict[str, Results] = {}
    for ranks in sorted(set(KINDS_OF_RANKS.values())):
        kinds = [kind for kind, count in KINDS_OF_RANKS.items() if count == ranks]
        cases = [Case(f"{MODULE}:train_on", {"kind": kind, "root": str(root / "on")}, kind) for kind in kinds]
        cases += [
            Case(f"{MODULE}:change_behind_the_fence", {"kind": kind, "root": str(root / "behind")}, f"{kind}-changed")
            for kind in kinds
            if kind in CHANGED
        ]
        world = run_world(ranks, cases, root / f"world-{ranks}", deadline_seconds=200.0)
        found |= dict.fromkeys([case.key() for case in cases], world)
    return found


@pytest.mark.parametrize("kind", KINDS_OF_RANKS)
def test_training_goes_on_and_what_is_saved_is_the_state_of_the_call(results: dict[str, Results], kind: str) -> None:
    values = results[kind].values(kind)
    assert all(isinstance(each, dict) and each["same"] and each["changed"] for each in values), values
    # FSDP1 moves its parameters in forward: no arena of one buffer holds a copy of them, so they are written at once.
    expected = "none" if kind.startswith("fsdp1") else "lazy"
    assert {each["staging"] for each in values if isinstance(each, dict)} == {expected}
    if expected == "lazy":
        assert any(each["fenced"] for each in values if isinstance(each, dict)), "no rank ever waited at the fence"


@pytest.mark.parametrize("kind", CHANGED)
def test_a_change_behind_the_fence_on_one_rank_aborts_the_save_on_all(results: dict[str, Results], kind: str) -> None:
    values = results[f"{kind}-changed"].values(f"{kind}-changed")
    for rank, value in enumerate(values):
        assert isinstance(value, dict)
        assert "changed while being copied lazily" in value["said"], (rank, value)
        assert rank == len(values) - 1 or f"rank {len(values) - 1} aborted" in value["said"]
        assert value["after"] and value["steps"] == [2]
