"""Pieces as columns of numbers: there may be millions, too many for one Python object each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.base.geometry.region import row_major
from holdfast.core.format.index.coding_columns import Bools, CodingColumns, CodingJoiner
from holdfast.core.format.index.columns import Ints, positions, run_starts, runs_taken
from holdfast.core.format.index.tensor_table import TensorTable

_BY_PIECE = ("tensors", "packs", "offsets", "flat", "widths", "bytes", "chunks")
"""Columns of `PieceColumns` with one number for each piece."""

_BY_COORDINATE = ("starts", "stops")
"""Columns with one number for each coordinate of each piece."""


@dataclass(frozen=True, eq=False)
class PieceColumns:
    """Columns with one entry for each piece, or for each coordinate or chunk of each piece."""

    tensors: Ints
    """Number of its tensor; shape (pieces,)."""

    packs: Ints
    """Number of its pack."""

    offsets: Ints
    """Bytes from the start of the pack."""

    flat: Bools
    """Whether it is a flat range; otherwise it is a box."""

    widths: Ints
    """Number of its coordinates: one for a flat range, one per dimension for a box."""

    starts: Ints
    """First coordinates, piece after piece; shape (sum of widths,)."""

    stops: Ints
    """Coordinates past the last, piece after piece; shape (sum of widths,)."""

    bytes: Ints
    """Its size."""

    chunks: Ints
    """Number of its chunks."""

    digests: memoryview
    """16 bytes for each chunk, piece after piece."""

    coding: CodingColumns | None = None
    """How the coded pieces are coded; None if none is."""

    @cached_property
    def first_coordinate(self) -> Ints:
        """Start of each piece's coordinates, and the end of the last; shape (pieces + 1,)."""
        return run_starts(self.widths)

    @cached_property
    def first_chunk(self) -> Ints:
        """Number of each piece's first chunk, and one past the last chunk; shape (pieces + 1,)."""
        return run_starts(self.chunks)

    @cached_property
    def stored(self) -> Ints:
        """Bytes of each piece in its pack."""
        return self.bytes if self.coding is None else np.where(self.coding.coded, self.coding.stored, self.bytes)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.tensors)

    def taken(self, numbers: Ints) -> PieceColumns:
        """Return the pieces with these numbers, in this order."""
        digests = runs_taken(np.frombuffer(self.digests, dtype=f"V{DIGEST_BYTES}"), self.first_chunk, numbers)
        coding = None if self.coding is None else self.coding.taken(numbers)
        return self._select(numbers, positions(self.first_coordinate, numbers), digests.view(np.uint8).data, coding)

    def between(self, first: int, stop: int) -> PieceColumns:
        """Return the pieces of a half-open run of numbers, without a copy."""
        coordinates = slice(int(self.first_coordinate[first]), int(self.first_coordinate[stop]))
        chunk_first, chunk_stop = int(self.first_chunk[first]), int(self.first_chunk[stop])
        digests = self.digests[DIGEST_BYTES * chunk_first : DIGEST_BYTES * chunk_stop]
        coding = None if self.coding is None else self.coding.between(first, stop)
        return self._select(slice(first, stop), coordinates, digests, coding)

    def _select(
        self, pieces: Ints | slice, coordinates: Ints | slice, digests: memoryview, coding: CodingColumns | None
    ) -> PieceColumns:
        columns = {name: getattr(self, name)[pieces] for name in _BY_PIECE}
        columns |= {name: getattr(self, name)[coordinates] for name in _BY_COORDINATE}
        return PieceColumns(**columns, digests=digests, coding=coding)

    def order(self) -> Ints:
        """Return the numbers of the pieces in order of tensor and start."""
        # Stable sorts from the least to the most significant key: last dimension first, tensor last.
        order = np.arange(self.count)
        first = self.first_coordinate
        for dim in reversed(range(int(self.widths.max()) if self.count else 0)):
            at = np.minimum(first[:-1] + dim, max(len(self.starts) - 1, 0))
            start = np.where(self.widths > dim, self.starts[at], 0)
            order = order[np.argsort(start[order], kind="stable")]
        return order[np.argsort(self.tensors[order], kind="stable")]


class PieceJoiner:
    """Joins the pieces of several indexes, which share the numbers of tensors and packs.

    Each column grows in place. Thousands of small arrays, joined at the end, would need twice the memory.
    """

    def __init__(self) -> None:
        """Begin with no pieces."""
        self._columns = {name: bytearray() for name in (*_BY_PIECE, *_BY_COORDINATE, "digests")}
        self._coding = CodingJoiner()

    def add(self, pieces: PieceColumns) -> None:
        """Append pieces."""
        for name, column in self._columns.items():
            column.extend(getattr(pieces, name))
        self._coding.add(pieces.count, pieces.coding)

    def columns(self) -> dict[str, Any]:
        """Return the columns of all pieces. Nothing can be added afterwards."""
        columns, self._columns = self._columns, {}
        digests = memoryview(columns.pop("digests"))
        dtypes = {name: bool if name == "flat" else np.int64 for name in columns}
        joined = {name: np.frombuffer(columns[name], dtypes[name]) for name in dtypes}
        return {**joined, "digests": digests, "coding": self._coding.columns()}


def in_order(columns: dict[str, Any]) -> PieceColumns:
    """Return pieces in order of tensor and start.

    Args:
        columns: The columns of `PieceColumns`. If they are not in order, the dict is emptied, and each column is freed
            once it is sorted.
    """
    order = PieceColumns(**columns).order()
    if bool((order[1:] > order[:-1]).all()):
        return PieceColumns(**columns)
    digests = np.frombuffer(columns.pop("digests"), dtype=f"V{DIGEST_BYTES}")
    digests = runs_taken(digests, run_starts(columns["chunks"]), order)
    first = run_starts(columns["widths"])
    ordered = {name: runs_taken(columns.pop(name), first, order) for name in _BY_COORDINATE}
    ordered |= {name: columns.pop(name)[order] for name in _BY_PIECE}
    coding: CodingColumns | None = columns.pop("coding")
    coding = None if coding is None else coding.taken(order)
    return PieceColumns(**ordered, digests=digests.view(np.uint8).data, coding=coding)


def bounds_of(table: TensorTable, tensors: Ints, flat: Bools, widths: Ints) -> Ints:
    """Return the limit of each coordinate: the length of its dimension, or for a flat range the tensor's elements."""
    bounds = table.lengths[positions(table.first_length, tensors[~flat])]
    if not flat.any():
        return bounds
    merged = np.empty(int(widths.sum()), dtype=np.int64)
    of_flat = np.repeat(flat, widths)
    merged[~of_flat] = bounds
    merged[of_flat] = table.numels[tensors[flat]]
    return merged


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
        """Return, ascending, the numbers of all pieces that overlap a box, and perhaps of flat ranges near it."""
        # No piece has more than `_rows_max` rows, so a piece that begins earlier than that ends before the box.
        first, stop = (box.start[0], box.stop[0]) if box.start else (0, 1)
        low, high = np.searchsorted(self._first_rows, (first - self._rows_max, stop))
        numbers = np.sort(self._order[low:high])
        return numbers[self._overlaps(numbers, box)]

    def _overlaps(self, numbers: Ints, box: Box) -> Bools:
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
