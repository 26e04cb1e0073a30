"""Finds the piece that each piece is coded against: that of the paired tensor with the same region."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from holdfast.core.format.index.columns import Ints
from holdfast.core.format.index.piece_columns import PieceColumns
from holdfast.core.format.index.tensor_table import TensorTable

NO_PIECE = -1
"""Number of a piece that there is not."""


def pair_pieces(table: TensorTable, pieces: PieceColumns) -> Ints:
    """Return, for each piece, the number of the piece that it is coded against; `NO_PIECE` if none is listed."""
    result = np.full(pieces.count, NO_PIECE, dtype=np.int64)
    coding = pieces.coding
    if coding is None or not coding.pair_fqns:
        return result
    tensor_of_pair = np.array([table.numbers.get(fqn, NO_PIECE) for fqn in coding.pair_fqns], dtype=np.int64)
    asking = np.flatnonzero(coding.pairs)
    wanted = tensor_of_pair[coding.pairs[asking] - 1]
    asking, wanted = asking[wanted != NO_PIECE], wanted[wanted != NO_PIECE]
    is_paired = np.zeros(table.count, dtype=bool)
    is_paired[wanted] = True
    candidates = np.flatnonzero(is_paired[pieces.tensors])
    rows = _Rows(pieces, np.concatenate((candidates, asking)), np.concatenate((pieces.tensors[candidates], wanted)))
    # Sorts are stable, so a candidate comes before those that ask for it.
    order = np.arange(len(rows.numbers))
    for key in rows.sort_keys():
        order = order[np.argsort(key[order], kind="stable")]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = False
    for key in rows.sort_keys():
        begins[1:] |= key[order][1:] != key[order][:-1]
    leader = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    found = (order >= len(candidates)) & (leader < len(candidates))
    result[asking[order[found] - len(candidates)]] = candidates[leader[found]]
    return result


class _Rows:
    """Pieces to compare by tensor and region, one key at a time: all at once may be many for one with 64 dimensions."""

    def __init__(self, pieces: PieceColumns, numbers: Ints, tensors: Ints) -> None:
        self._pieces, self.numbers, self._tensors = pieces, numbers, tensors

    def sort_keys(self) -> Iterator[NDArray[np.int64] | NDArray[np.bool_]]:
        """Yield the keys of all rows, the most significant last."""
        pieces, numbers = self._pieces, self.numbers
        widths, first = pieces.widths[numbers], pieces.first_coordinate[numbers]
        for dim in range(int(widths.max(initial=0))):
            at = np.minimum(first + dim, len(pieces.starts) - 1)
            for column in (pieces.stops, pieces.starts):
                yield np.where(widths > dim, column[at], 0)
        yield pieces.flat[numbers]
        yield widths
        yield self._tensors
