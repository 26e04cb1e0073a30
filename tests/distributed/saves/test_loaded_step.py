"""A save at the step just loaded is finished on real ranks if none has changed, and refused on all if one has."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.api import list_steps
from tests.support.gloo_worlds import Case, Results, run_world

MODULE = "tests.distributed.saves.loaded_step_cases"
CHANGES = {
    "ddp": [
        ("nothing", [0, 1]),
        ("evaluate", [0, 1]),
        ("write_data", [0, 1]),
        ("step_fused", [0, 1]),
        ("write_own", [1]),
        ("write_data", [1]),
        ("step_fused", [0]),
        ("set_rate", [0, 1]),
        ("count", [1]),
        ("nothing", [0, 1]),
    ],
    "fsdp2": [
        ("nothing", [0, 1]),
        ("evaluate", [0, 1]),
        ("write_data", [0, 1]),
        ("step_fused", [0, 1]),
        ("write_own", [1]),
        ("write_data", [1]),
        ("write_average", [0]),
        ("set_rate", [1]),
        ("count", [0]),
        ("nothing", [0, 1]),
    ],
    "fsdp1": [("nothing", [0, 1]), ("evaluate", [0, 1]), ("step_fused", [0, 1])],
}
"""By layout, what is changed between load and save, and on which ranks."""

SAVED = {"nothing", "evaluate"}
PARTED = [("ddp", "write_data", [1]), ("ddp", "step_fused", [0])]
"""Copies that must be equal are not any more: this is said first."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def world(root: Path) -> Results:
    cases = [
        Case(f"{MODULE}:save_what_was_loaded", {"root": str(root / each), "layout": each, "changes": changes}, each)
        for each, changes in CHANGES.items()
    ]
    return run_world(2, cases, root / "world")


@pytest.mark.parametrize(
    ("layout", "number"), [(layout, number) for layout, changes in CHANGES.items() for number in range(len(changes))]
)
def test_a_save_at_the_loaded_step_is_finished_or_refused_on_every_rank(
    world: Results, layout: str, number: int
) -> None:
    change, ranks = CHANGES[layout][number]
    for said in world.values(layout):
        assert isinstance(said, list)
        outcome, text = said[number]
        if change in SAVED:
            assert (outcome, text) == (10, 0), "nothing was written"
        elif (layout, change, ranks) in PARTED:
            assert outcome == "InvalidError" and "ranks [0] ≠ ranks [1]" in text and "Expected equal copies" in text
        else:
            assert outcome == "ConflictError" and "already there" in text
            assert "Save the state as another step" in text and "discard_newer" in text


@pytest.mark.parametrize("layout", CHANGES)
def test_only_a_finished_save_gives_its_tags(world: Results, root: Path, layout: str) -> None:
    world.values(layout)
    finished = {f"change-{number}" for number, (change, _) in enumerate(CHANGES[layout]) if change in SAVED}
    assert [{*record.tags} for record in list_steps(root / layout).steps] == [finished, set()]
