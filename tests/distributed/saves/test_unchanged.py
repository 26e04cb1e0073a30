"""A frozen backbone is stored once by real gloo ranks under FSDP2: while they go on, resume, and are others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import api
from tests.distributed.saves.unchanged_cases import ROWS
from tests.support.gloo_worlds import Case, run_world

MODULE = "tests.distributed.saves.unchanged_cases"
BACKBONE = 2 * 4 * ROWS * 600
STEPS = [1, 2, 3, 4, 5, 6, 7]

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Outcome:
    root: Path
    saved: dict[int, list[list[Any]]]
    """By step, what each rank said of its save: bytes, unchanged bytes, staging, digests."""
    resumed: list[list[dict[str, Any]]]
    loaded: list[dict[str, dict[str, str]]]


@pytest.fixture(scope="module", params=["copy", "lazy"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two ranks save 1 to 3; two save 4 and 5 after they resumed; three resume and save 6 and 7; one rank loads all."""
    scratch = tmp_path_factory.mktemp("unchanged")
    root = scratch / "run"
    lazily = request.param == "lazy"
    saved: dict[int, list[list[Any]]] = {}
    resumed = []
    for number, (ranks, first, steps) in enumerate([(2, 1, 3), (2, 4, 2), (3, 6, 2)]):
        arguments = {"root": str(root), "first": first, "steps": steps, "resume": number > 0, "lazily": lazily}
        world = run_world(ranks, [Case(f"{MODULE}:train_and_save", arguments)], scratch / f"world-{number}")
        values: list[Any] = world.values("train_and_save")
        saved |= {step: [each[str(step)] for each in values] for step in range(first, first + steps)}
        resumed.append(values)
    arguments = {"root": str(root), "steps": STEPS}
    world = run_world(1, [Case(f"{MODULE}:load_each", arguments)], scratch / "world-last")
    loaded: list[Any] = world.values("load_each")
    return Outcome(root, saved, resumed, loaded)


def test_the_backbone_is_written_once_for_each_layout(outcome: Outcome) -> None:
    unchanged = {step: sum(rank[1] for rank in ranks) for step, ranks in outcome.saved.items()}
    # Step 4 follows a load on the same layout; step 6 one on another, where every piece is another.
    assert unchanged == {1: 0, 2: BACKBONE, 3: BACKBONE, 4: BACKBONE, 5: BACKBONE, 6: 0, 7: BACKBONE}
    written = {step: sum(rank[0] for rank in ranks) for step, ranks in outcome.saved.items()}
    assert max(written[step] for step in (2, 3, 4, 5, 7)) < BACKBONE / 10


def test_references_lead_to_the_step_that_holds_the_bytes(outcome: Outcome) -> None:
    referred = {
        step: list(holdfast.open_checkpoint(outcome.root / f"step-{step:012d}").packs_of_other_steps) for step in STEPS
    }
    assert referred == {1: [], 2: [1], 3: [1], 4: [1], 5: [1], 6: [], 7: [6]}
    assert all(record.stands_alone for record in api.list_steps(outcome.root).steps), "each rank linked its packs"


def test_every_rank_resumes_with_what_was_saved_last(outcome: Outcome) -> None:
    for number, step in ((1, 3), (2, 5)):
        for rank in outcome.resumed[number]:
            assert rank["resumed"] == step
            assert rank["loaded"] == outcome.saved[step][0][3]


def test_every_step_loads_bit_exact_and_verifies_whole(outcome: Outcome) -> None:
    for step in STEPS:
        assert outcome.loaded[0][str(step)] == outcome.saved[step][0][3], step
        assert list(holdfast.open_checkpoint(outcome.root / f"step-{step:012d}").verify()) == []
    trained = [outcome.saved[step][0][3]["adapter.0.weight"] for step in STEPS]
    assert len(set(trained)) == len(STEPS), "the adapter was trained"
