"""Pieces as columns: millions of them in as many numbers, a Python value made only of those that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from holdfast.format.index.columns import Ints, positions, run_starts
from holdfast.format.index.tensor_table import TensorTable
from holdfast.geometry.chunking import DIGEST_BYTES
from holdfast.geometry.region import FlatRange, Region

Bools = NDArray[np.bool_]

_BY_PIECE = ("tensors", "packs", "offsets", "flat", "widths", "bytes", "chunks")
"""Columns of `PieceColumns` with one number for each piece."""

_BY_COORDINATE = ("starts", "stops")
"""Columns with one number for each coordinate of each piece."""


@dataclass(frozen=True, eq=False)
class PieceColumns:
    """Pieces by number."""

    tensors: Ints
    """Number of the tensor of each."""

    packs: Ints
    """Number of its pack."""

    offsets: Ints
    """Bytes from the start of the pack."""

    flat: Bools
    """Whether it is a flat range; otherwise a box."""

    widths: Ints
    """Coordinates of each: one for a flat range, for a box one per dimension."""

    starts: Ints
    """First coordinates, one piece after the other."""

    stops: Ints
    """Coordinates past the last, likewise."""

    bytes: Ints
    """Size of each."""

    chunks: Ints
    """Count of chunks of each."""

    digests: memoryview
    """16 bytes per chunk, piece after piece."""

    @cached_property
    def first_coordinate(self) -> Ints:
        """For each piece, and one past the last: where its coordinates begin."""
        return run_starts(self.widths)

    @cached_property
    def first_chunk(self) -> Ints:
        """For each piece, and one past the last: number of its first chunk."""
        return run_starts(self.chunks)

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return len(self.tensors)

    def taken(self, numbers: Ints) -> PieceColumns:
        """Return some of the pieces, in the order given."""
        chunks = positions(self.first_chunk, numbers)
        digests = np.frombuffer(self.digests, dtype=f"V{DIGEST_BYTES}")[chunks]
        return self._select(numbers, positions(self.first_coordinate, numbers), digests.view(np.uint8).data)

    def between(self, first: int, stop: int) -> PieceColumns:
        """Return the pieces of a half-open run of numbers, without a copy."""
        coordinates = slice(int(self.first_coordinate[first]), int(self.first_coordinate[stop]))
        chunk_first, chunk_stop = int(self.first_chunk[first]), int(self.first_chunk[stop])
        digests = self.digests[DIGEST_BYTES * chunk_first : DIGEST_BYTES * chunk_stop]
        return self._select(slice(first, stop), coordinates, digests)

    def _select(self, pieces: Ints | slice, coordinates: Ints | slice, digests: memoryview) -> PieceColumns:
        columns = {name: getattr(self, name)[pieces] for name in _BY_PIECE}
        columns |= {name: getattr(self, name)[coordinates] for name in _BY_COORDINATE}
        return PieceColumns(**columns, digests=digests)

    def order(self) -> Ints:
        """Return the numbers of the pieces by tensor, and by where they start in it."""
        order = np.arange(self.count)
        first = self.first_coordinate
        for dim in reversed(range(int(self.widths.max()) if self.count else 0)):
            at = np.minimum(first[:-1] + dim, max(len(self.starts) - 1, 0))
            start = np.where(self.widths > dim, self.starts[at], 0)
            order = order[np.argsort(start[order], kind="stable")]
        return order[np.argsort(self.tensors[order], kind="stable")]


def joined(parts: Sequence[PieceColumns]) -> PieceColumns:
    """Return pieces of several parts as one; their tensors and packs are numbered alike."""
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts or [_NONE]]) for name in _BY_PIECE + _BY_COORDINATE
    }
    return PieceColumns(**columns, digests=memoryview(b"".join(part.digests for part in parts)))


def corners(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first coordinates of a region and those past the last. A flat range has one coordinate."""
    if isinstance(region, FlatRange):
        return (region.start,), (region.stop,)
    return region.start, region.stop


_NONE = PieceColumns(
    *(np.empty(0, dtype=np.int64),) * 3, np.empty(0, dtype=bool), *(np.empty(0, dtype=np.int64),) * 5, memoryview(b"")
)
"""No piece at all."""


def bounds_of(table: TensorTable, tensors: Ints, flat: Bools, widths: Ints) -> Ints:
    """Return what no coordinate of a piece may exceed: the length of its dimension, or the elements of its tensor."""
    bounds = table.lengths[positions(table.first_length, tensors[~flat])]
    if not flat.any():
        return bounds
    found = np.empty(int(widths.sum()), dtype=np.int64)
    of_flat = np.repeat(flat, widths)
    found[~of_flat] = bounds
    found[of_flat] = table.numels[tensors[flat]]
    return found
