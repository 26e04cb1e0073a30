"""A dead rank on paper: the calls to the key-value store grow with the number of ranks, not with its square."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.scale import SETTINGS, location_at
from bench.silence_on_paper import calls_with_a_dead_rank
from bench.synthetic import dense
from holdfast.training.coordination.absent_ranks import ASKING_RANKS


@pytest.mark.parametrize("ranks", (128, 512))
def test_a_dead_rank_costs_few_calls_for_each_rank(tmp_path: Path, ranks: int) -> None:
    calls = calls_with_a_dead_rank(dense(ranks), location_at(tmp_path), SETTINGS)
    # The floor is 200,000 calls of 16,384 ranks.
    assert calls["store_calls_dead_rank"] <= 4 * ranks + 8 * ASKING_RANKS, calls
    assert calls["store_calls_dead_rank_not_0"] <= 4 * ranks + 8 * ASKING_RANKS, calls
