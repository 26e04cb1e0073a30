"""The histogram of a tensor, at the ends of the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import api

_DENORMAL = 5e-324

EXTREMES = {
    "constant": (torch.full((4,), 1e20), 4),
    "lowest": (torch.full((4,), torch.finfo(torch.float32).min), 4),
    "constant_int": (torch.full((4,), 1 << 60), 4),
    "close_ints": (torch.tensor([1 << 60, (1 << 60) + 1, (1 << 60) + 512]), 2),
    "close": (torch.tensor([1.0, 1.0, 1 + 2**-52], dtype=torch.float64), 2),
    "denormal": (torch.tensor([0.0, _DENORMAL, _DENORMAL], dtype=torch.float64), 1),
    "far": (torch.tensor([-1.7e308, -1.7e308, 1.7e308], dtype=torch.float64), 2),
}
"""A tensor, and how many of its elements the first bin counts."""


@pytest.mark.parametrize("name", EXTREMES)
def test_a_histogram_counts_each_finite_number(name: str, tmp_path: Path) -> None:
    tensor, first = EXTREMES[name]
    holdfast.save(tmp_path / "one", {"w": tensor}, process_group=False)
    found = api.statistics(api.open_checkpoint(tmp_path / "one"), "w").histogram
    assert (found[0], sum(found)) == (first, len(tensor))
    assert found[-1] == len(tensor) - first, "the largest numbers are in the last bin"
