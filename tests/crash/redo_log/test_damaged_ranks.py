"""Damage to the log of one rank ends the redo of all ranks at the same step, before the damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.gloo_worlds import Case, run_world

pytestmark = pytest.mark.long

CUTS = 100 if os.environ.get("FLIPPED_BYTES") == "all" else 8


def test_all_ranks_end_before_the_damage(tmp_path: Path) -> None:
    layouts = ("ddp", "fsdp")
    cases = [
        Case(
            "tests.crash.redo_log.damaged_run:load_damaged",
            {"root": str(tmp_path / layout), "layout": layout, "cuts": CUTS},
            layout,
        )
        for layout in layouts
    ]
    results = run_world(2, cases, tmp_path / "world")
    for layout in layouts:
        ranks = results.values(layout)
        assert all(isinstance(each, list) and len(each) == 2 * 6 + 2 * CUTS for each in ranks)
        for first, second in zip(*ranks, strict=True):
            assert first == second
            assert (first["step"], first["is_right"]) == (first["before"], True), first
