"""Cuts what a rank writes at a grid of elements, so that a store of objects gets many of a moderate size.

The grid depends on the shape of a tensor alone, not on its dtype, the ranks, or what else a rank writes. So a parameter
and its moments are cut at the same elements, and a later save cuts an unchanged tensor as an earlier one did.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import Shard
from holdfast.core.plan.ownership import Owned


def cut_at_grid(shards: Sequence[Shard], owned: Sequence[Owned], cell_elements: int) -> list[Owned]:
    """Return the same elements in regions of at most `cell_elements`, each contiguous in the memory of its piece.

    Args:
        shards: Shards of this rank.
        owned: What it writes of them.
        cell_elements: Elements of a cell of the grid.
    """
    return [
        Owned(part.shard_number, region)
        for part in owned
        for region in cells_of(part.region, shards[part.shard_number].tensor.global_shape, cell_elements)
    ]


def cells_of(region: Region, global_shape: tuple[int, ...], cell_elements: int) -> Iterator[Region]:
    """Yield the parts of a region between the lines of the grid, in row-major order; a small region is not cut.

    A flat range is cut at multiples of `cell_elements`. A box is cut along the last dimension whose rows it cannot take
    whole, at multiples of the rows of the *whole* tensor that fit a cell. Where the box has only a part of each row,
    it takes several cells together, so that pieces stay as large as they may be.
    """
    if region.numel <= cell_elements:
        yield region
    elif isinstance(region, FlatRange):
        for start, stop in _runs(region.start, region.stop, cell_elements):
            yield FlatRange(start, stop)
    else:
        yield from _cells_of_box(region, global_shape, cell_elements)


def _cells_of_box(box: Box, global_shape: tuple[int, ...], cell_elements: int) -> Iterator[Box]:
    dim, row_elements = len(box.shape) - 1, 1
    while row_elements * box.shape[dim] <= cell_elements:
        row_elements *= box.shape[dim]
        dim -= 1
    rows = max(cell_elements // math.prod(global_shape[dim + 1 :]), 1)
    rows *= max(cell_elements // (row_elements * rows), 1)
    for index in itertools.product(*map(range, box.start[:dim], box.stop[:dim])):
        after = tuple(number + 1 for number in index)
        for start, stop in _runs(box.start[dim], box.stop[dim], rows):
            yield Box((*index, start, *box.start[dim + 1 :]), (*after, stop, *box.stop[dim + 1 :]))


def _runs(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the runs between `start`, the multiples of `length`, and `stop`."""
    while start < stop:
        end = min((start // length + 1) * length, stop)
        yield start, end
        start = end
