"""Runs in columns: what the numpy code returns is what a loop returns."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.format.index import columns
from holdfast.core.format.index.columns import products, run_starts, runs_taken

RUNS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=12)


def joined(runs: list[list[int]]) -> columns.Ints:
    return np.array([number for run in runs for number in run], dtype=np.int64)


def counts_of(runs: list[list[int]]) -> columns.Ints:
    return np.array(list(map(len, runs)), dtype=np.int64)


@given(RUNS)
def test_the_product_of_each_run(runs: list[list[int]]) -> None:
    assert products(counts_of(runs), joined(runs)).tolist() == list(map(math.prod, runs))
    assert products(counts_of(runs), joined(runs).astype(np.float64)).tolist() == list(map(math.prod, runs))


@pytest.mark.parametrize("block", [1, 2, 1 << 17])
def test_runs_are_taken_block_by_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_BLOCK", block)
    runs = [[3, 1], [], [4], [1, 5, 9], []]
    for numbers in ([], [3, 0, 0], [1, 4], [4, 3, 2, 1, 0]):
        taken = runs_taken(joined(runs), run_starts(counts_of(runs)), np.array(numbers, dtype=np.int64))
        assert taken.tolist() == [value for number in numbers for value in runs[number]]
