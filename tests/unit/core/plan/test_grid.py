"""How what a rank writes is cut at the grid: everything once, small enough, at lines that the shape alone decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region, region_boxes
from holdfast.core.plan.grid import cells_of


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.booleans()):
        first, last = sorted((draw(st.integers(0, math.prod(shape))), draw(st.integers(0, math.prod(shape)))))
        return FlatRange(first, last), shape
    corners = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in corners), tuple(b for _, b in corners)), shape


@settings(max_examples=400, deadline=None)
@given(regions(), st.integers(1, 40))
def test_the_cells_are_the_region_once_and_none_is_too_large(
    drawn: tuple[Region, tuple[int, ...]], cell_elements: int
) -> None:
    region, shape = drawn
    cells = list(cells_of(region, shape, cell_elements))
    count = np.zeros(shape, int)
    for cell in cells:
        assert type(cell) is type(region)
        assert cell.numel <= cell_elements
        for box in region_boxes(cell, shape):
            count[box.relative_to((0,) * len(shape))] += 1
    wanted = np.zeros(shape, int)
    for box in region_boxes(region, shape):
        wanted[box.relative_to((0,) * len(shape))] += 1
    assert (count == wanted).all()
    if isinstance(region, Box) and region.numel:
        # Contiguous in the memory of the piece, in order: what a rank writes of a piece is read in one run.
        numbers = np.arange(region.numel).reshape(region.shape)
        read = [numbers[cell.relative_to(region.start)].ravel() for cell in cells]  # type: ignore[union-attr]
        assert (np.concatenate(read) == np.arange(region.numel)).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 40), st.integers(0, 199), st.integers(1, 200))
def test_parts_of_a_tensor_are_cut_at_the_lines_of_the_whole(
    rows: int, columns: int, cell_elements: int, first: int, count: int
) -> None:
    shape = (rows, columns)
    first, last = min(first, rows - 1), min(first + count, rows)
    lines = {cell.stop for cell in cells_of(Box.whole(shape), shape, cell_elements)}  # type: ignore[union-attr]
    cells = list(cells_of(Box((first, 0), (last, columns)), shape, cell_elements))
    assert all(cell.stop in lines for cell in cells[:-1])  # type: ignore[union-attr]


def test_a_part_of_each_row_takes_several_cells_together() -> None:
    shape = (4096, 4096)
    whole = list(cells_of(Box.whole(shape), shape, 1 << 20))
    part = list(cells_of(Box((0, 512), (4096, 1024)), shape, 1 << 20))
    assert [cell.numel for cell in whole] == [1 << 20] * 16
    assert [cell.numel for cell in part] == [1 << 20] * 2


@pytest.mark.parametrize("region", [Box((0, 0), (0, 7)), Box((2, 1), (3, 2)), FlatRange(5, 5), FlatRange(0, 21)])
def test_a_small_region_is_not_cut(region: Region) -> None:
    assert list(cells_of(region, (3, 7), 21)) == [region]
