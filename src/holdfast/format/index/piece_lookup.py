"""Lookup of the pieces of one tensor that overlap a box, without testing every piece."""

from __future__ import annotations

import math

import numpy as np

from holdfast.format.index.columns import Ints
from holdfast.format.index.piece_columns import PieceColumns
from holdfast.geometry.box import Box
from holdfast.geometry.region import row_major


class PieceIntervals:
    """The pieces of one tensor, sorted by the first row that they touch."""

    def __init__(self, pieces: PieceColumns, shape: tuple[int, ...]) -> None:
        """Sort the pieces.

        Args:
            pieces: Pieces of one tensor.
            shape: Its global shape.
        """
        self._pieces, self._shape = pieces, shape
        at = pieces.first_coordinate[:-1]
        if shape:
            row = math.prod(shape[1:]) or 1
            first = np.where(pieces.flat, pieces.starts[at] // row, pieces.starts[at])
            stop = np.where(pieces.flat, -(-pieces.stops[at] // row), pieces.stops[at])
        else:
            first, stop = np.zeros(pieces.count, np.int64), np.ones(pieces.count, np.int64)
        self._order = np.argsort(first, kind="stable")
        self._first_rows = first[self._order]
        self._rows_max = int((stop - first).max()) if pieces.count else 0

    def near(self, box: Box) -> Ints:
        """Return the numbers of all pieces that overlap a box, ascending; near flat ranges may be among them."""
        # No piece has more than `_rows_max` rows, so a piece that begins earlier than that ends before the box.
        first, stop = (box.start[0], box.stop[0]) if box.start else (0, 1)
        low, high = np.searchsorted(self._first_rows, (first - self._rows_max, stop))
        numbers = np.sort(self._order[low:high])
        return numbers[self._overlaps(numbers, box)]

    def _overlaps(self, numbers: Ints, box: Box) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of these pieces overlap a box. Flat ranges count if they overlap its row-major span."""
        pieces, shape = self._pieces, self._shape
        flat = pieces.flat[numbers]
        at = pieces.first_coordinate[numbers]
        overlaps = np.ones(len(numbers), dtype=bool)
        for dim in range(len(shape)):
            where = np.where(flat, at, at + dim)
            inside = (pieces.starts[where] < box.stop[dim]) & (pieces.stops[where] > box.start[dim])
            overlaps &= inside | flat
        if flat.any() and shape:
            first, last = (row_major(corner, shape) for corner in (box.start, tuple(stop - 1 for stop in box.stop)))
            overlaps &= ~flat | ((pieces.starts[at] <= last) & (pieces.stops[at] > first))
        return overlaps
