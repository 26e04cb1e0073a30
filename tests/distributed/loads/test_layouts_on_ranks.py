"""Layouts on real gloo processes: a checkpoint of Megatron into shards of a Hugging Face model, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.gloo_worlds import Case, run_world
from tests.unit.test_layouts import CASES, FIXTURES

FUNCTIONS = "tests.distributed.loads.layout_cases"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_its_rows_bit_for_bit_and_a_byte_is_read_once(ranks: int, tmp_path: Path) -> None:
    fixtures = str(FIXTURES)
    loads = [
        Case(f"{FUNCTIONS}:load", {"fixtures": fixtures, "case": case, "exchange": exchange}, f"{case} {exchange}")
        for case in CASES
        for exchange in ("always", "never")
    ]
    results = run_world(ranks, [*loads, Case(f"{FUNCTIONS}:differ", {"fixtures": fixtures}, "differ")], tmp_path)
    for case in CASES:
        names = (FIXTURES / case / "hf" / "model.safetensors", "numpy")
        with safe_open(*names) as file:
            wanted = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - a file is no dict
        read = sum(count for count, _ in results.values(f"{case} always"))
        # Rows of padding lie in the chunks of the vocabulary.
        assert wanted <= read <= wanted + 2 * 3 * 16 * 4
    errors = results.values("differ")
    assert all("layout=[megatron-dist" in error and "vocab=37" in error for error in errors), errors
