"""Ranks as runs: nothing is lost, and what lies evenly takes three numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.base.geometry.rank_ranges import rank_ranges, ranks_in


@given(st.sets(st.integers(0, 200)).map(sorted))
def test_ranks_come_back(ranks: list[int]) -> None:
    runs = rank_ranges(ranks)
    assert ranks_in(runs) == tuple(ranks)
    assert len(runs) <= max((len(ranks) + 1) // 2, 0)


@pytest.mark.parametrize("ranks", [range(16384), range(1024, 2048), range(3, 16384, 8)])
def test_what_lies_evenly_is_one_run(ranks: range) -> None:
    assert len(rank_ranges(ranks)) == 1
