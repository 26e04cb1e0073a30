"""Which pieces of a tensor a box may meet, without asking each."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from holdfast.spec.box import Box
from holdfast.spec.plan import Piece
from holdfast.spec.region import FlatRange

Rows = tuple[int, int]
"""A half-open run of coordinates of dimension 0."""


class NearbyPieces:
    """Pieces of one tensor, ordered by the rows they touch."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Put them in order.

        Args:
            pieces: Stored pieces of one tensor.
        """
        ordered = sorted(((_rows(piece), number) for number, piece in enumerate(pieces)))
        self._pieces = [pieces[number] for _, number in ordered]
        self._first_rows = [first for (first, _), _ in ordered]
        self._rows_max = max((stop - first for (first, stop), _ in ordered), default=0)

    def near(self, boxes: Iterable[Box]) -> list[Piece]:
        """Return pieces among which are all that share an element with one of the boxes, each once."""
        numbers: set[int] = set()
        for box in boxes:
            first, stop = (box.start[0], box.stop[0]) if box.start else (0, 1)
            numbers.update(
                range(bisect_left(self._first_rows, first - self._rows_max), bisect_left(self._first_rows, stop))
            )
        return [self._pieces[number] for number in sorted(numbers)]


def _rows(piece: Piece) -> Rows:
    shape, region = piece.tensor.global_shape, piece.region
    if not shape:
        return 0, 1
    if isinstance(region, FlatRange):
        row = math.prod(shape[1:]) or 1
        return region.start // row, -(-region.stop // row)
    return region.start[0], region.stop[0]
