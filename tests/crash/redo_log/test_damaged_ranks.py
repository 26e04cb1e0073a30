"""Damage to the log of one rank ends the redo of all ranks at the same step, before the damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, run_world

pytestmark = pytest.mark.long

CUTS = 100 if os.environ.get("FLIPPED_BYTES") == "all" else 2
STRIDE = int(os.environ.get("SWEEP_STRIDE", "8"))
LAYOUTS = ("ddp", "fsdp")


def test_all_ranks_end_before_the_damage(tmp_path: Path) -> None:
    """Damaged segments, and then calls of one rank that fail."""
    of_cuts = [_case("load_damaged", layout, tmp_path, cuts=CUTS) for layout in LAYOUTS]
    of_faults = _case("load_with_faults", "fsdp", tmp_path, stride=STRIDE)
    results = run_world(2, [*of_cuts, of_faults], tmp_path / "world", deadline_seconds=280)

    for case in of_cuts:
        ranks = results.values(case.key())
        assert all(isinstance(each, list) and len(each) == 2 * 6 + 2 * CUTS for each in ranks)
        for first, second in zip(*ranks, strict=True):
            assert first == second
            assert (first["step"], first["is_right"]) == (first["before"], True), first
    steps = set()
    for first, second in zip(*results.values(of_faults.key()), strict=True):
        assert (first["step"], first["is_right"], second["is_right"]) == (second["step"], True, True), (first, second)
        assert bool(first["error"]) is bool(second["error"]) is (first["step"] is None)
        steps.add(first["step"])
    print(f"loads with faults ended at {steps}")
    assert len(steps) > 2 and 7 in steps


def _case(function: str, layout: str, folder: Path, **options: int) -> Case:
    name = f"{function}-{layout}"
    arguments = {"root": str(folder / name), "layout": layout, **options}
    return Case(f"tests.crash.redo_log.damaged_run:{function}", arguments, name)
