"""A save at the step just loaded is finished on real ranks if none has changed, and refused on all if one has."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.api import list_steps
from tests.distributed.launch import Case, Results, run_world

MODULE = "tests.distributed.loaded_step_cases"
LAYOUTS = ("ddp", "fsdp2")
KEPT = [(layout, change, [0, 1]) for layout in LAYOUTS for change in ("nothing", "evaluate")]
CHANGED = [
    *((layout, change, [0, 1]) for layout in LAYOUTS for change in ("write_data", "step_fused")),
    *(("fsdp2", change, [1]) for change in ("write_data", "write_average")),
    *((layout, "write_own", [1]) for layout in LAYOUTS),
]
PARTED = [("ddp", "write_data", [1]), ("ddp", "step_fused", [0])]
"""Copies that must be equal are not any more: this is said first."""

pytestmark = pytest.mark.timeout(300)


def name_of(layout: str, change: str, ranks: list[int]) -> str:
    return f"{layout}-{change}-{'-'.join(map(str, ranks))}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def world(root: Path) -> Results:
    cases = []
    for layout, change, ranks in (*KEPT, *CHANGED, *PARTED):
        name = name_of(layout, change, ranks)
        arguments = {"root": str(root / name), "layout": layout, "change": change, "ranks": ranks}
        cases.append(Case(f"{MODULE}:save_what_was_loaded", arguments, name))
    return run_world(2, cases, root / "world")


@pytest.mark.parametrize(("layout", "change", "ranks"), KEPT)
def test_what_no_rank_has_changed_is_saved_already(
    world: Results, root: Path, layout: str, change: str, ranks: list[int]
) -> None:
    name = name_of(layout, change, ranks)
    for said in world.values(name):
        assert said == {"saved": [10, 0], "steps": [10, 11]}
    assert [record.tags for record in list_steps(root / name).steps] == [("again",), ()]


@pytest.mark.parametrize(("layout", "change", "ranks"), [*CHANGED, *PARTED])
def test_what_one_rank_has_changed_is_refused_on_every_rank(
    world: Results, root: Path, layout: str, change: str, ranks: list[int]
) -> None:
    name = name_of(layout, change, ranks)
    for said in world.values(name):
        assert isinstance(said, dict) and said["steps"] == [10, 11]
        error, text = said["refused"]
        if (layout, change, ranks) in PARTED:
            assert error == "InvalidError" and "ranks [0] ≠ ranks [1]" in text and "Expected equal copies" in text
        else:
            assert error == "ConflictError" and "already there" in text
            assert "Save the state as another step" in text and "discard_newer" in text
    assert list_steps(root / name).tags == ()
