"""Trainer under FSDP2: killed, resumed, and loaded on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.integrations import table

FRAMEWORK = "transformers.sharded"


def test_a_killed_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    rows = list(table.Table(FRAMEWORK, tmp_path).rows("holdfast", ("voting",)))
    assert [(row.killed, row.resumed_from) for row in rows] == [("one", 2), ("all", 2)]
    assert all(table.is_well(row) for row in rows), rows


def test_other_numbers_of_ranks_load_the_same(tmp_path: Path) -> None:
    found = table.Table(FRAMEWORK, tmp_path).on_other_ranks()
    assert found["resumed_from"] == 2
    assert all(found[f"equal_on_{ranks}"] is True for ranks in table.RANKS_AFTER), found
