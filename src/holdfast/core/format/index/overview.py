"""The overview of a large index: every tensor, and which index file lists the pieces of which rows.

An index file covers a run of tensors and a band of their rows. So a rank that wants a few rows of many tensors, or
many rows of a few tensors, reads a small part of the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.core.format.index.columns import Ints, decode_column, encode_column
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.piece_columns import PieceColumns
from holdfast.core.format.index.tensor_table import Column, TensorsDocument, TensorTable, decode_tensors
from holdfast.core.format.sealed_json import decode_msgpack
from holdfast.errors import CorruptError
from holdfast.settings import PAGE_BYTES

BANDS_MAX = 128
"""Most bands that a writer cuts rows into. With 128, a rank of a large job needs one or two of them."""

_BANDS_READ_MAX = 4096
"""Most bands that a reader accepts."""


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """All tensors of a checkpoint, and the span of each index file."""

    chunk_bytes: int
    """Bytes of every chunk but the last of a piece."""

    table: TensorTable
    """Every tensor."""

    bands: int
    """Number of bands that the rows of each tensor are cut into."""

    spans: Ints
    """Span of each index file, in the order of the manifest: first tensor, tensor past the last, first band, band past
    the last; shape (files, 4)."""

    def files_for(self, fqn: str, box: Box) -> list[int]:
        """Return the numbers of the index files that may list a piece that overlaps a box of a tensor."""
        number = self.table.numbers[fqn]
        shape = self.table.specs[fqn].global_shape
        first_band = last_band = self.bands
        if shape and shape[0] > 1:
            share = -(-shape[0] // self.bands)
            first_band, last_band = box.start[0] // share, max(box.stop[0] - 1, box.start[0]) // share
        spans = self.spans
        met = (spans[:, 0] <= number) & (number < spans[:, 1]) & (spans[:, 2] <= last_band) & (first_band < spans[:, 3])
        return np.flatnonzero(met).tolist()

    def require_within(self, number: int, index: Index, where: str) -> None:
        """Refuse an index file that lists anything outside its span.

        Raises:
            CorruptError: A tensor differs from the overview, or a piece is outside the span of the file.
        """
        first_tensor, stop_tensor, first_band, stop_band = self.spans[number].tolist()
        if index.chunk_bytes != self.chunk_bytes:
            raise CorruptError(
                f"{where}: chunk_bytes={index.chunk_bytes}; expected {self.chunk_bytes}, as in the overview. "
                "Read another copy"
            )
        for fqn, tensor in index.tensors.items():
            if self.table.specs.get(fqn) != tensor or not first_tensor <= self.table.numbers[fqn] < stop_tensor:
                raise CorruptError(f"{where}: lists {tensor}, which the overview does not list here. Read another copy")
        first, stop = bands_touched(index.pieces, index.table, self.bands)
        outside = (first < first_band) | (stop > stop_band)
        if outside.any():
            fqn = list(index.tensors)[int(index.pieces.tensors[int(outside.argmax())])]
            raise CorruptError(
                f"{where}: a piece of {fqn} outside bands {first_band} to {stop_band} of its rows. Read another copy"
            )


def bands_touched(pieces: PieceColumns, table: TensorTable, bands: int) -> tuple[Ints, Ints]:
    """Return the first band of rows that each piece touches, and the band past the last.

    Tensors with at most one row get the extra band number `bands`, which readers of a few rows never need.
    """
    tensors = pieces.tensors
    deep = table.ndims[tensors] > 0
    rows = _rows(table)[tensors]
    row_numel = np.maximum(table.numels[tensors] // np.maximum(rows, 1), 1)
    first, stop = np.zeros_like(rows), np.ones_like(rows)
    at = pieces.first_coordinate[:-1]
    boxes, flats = ~pieces.flat & deep, pieces.flat
    first[boxes], stop[boxes] = pieces.starts[at[boxes]], pieces.stops[at[boxes]]
    first[flats] = pieces.starts[at[flats]] // row_numel[flats]
    stop[flats] = -(-pieces.stops[at[flats]] // row_numel[flats])
    share = np.maximum(-(-rows // bands), 1)
    # An empty piece may begin where its tensor ends.
    first_band = np.where(rows > 1, np.minimum(first, rows - 1) // share, bands)
    return first_band, np.maximum((stop - 1) // share, first_band) + 1


def _rows(table: TensorTable) -> Ints:
    """Return the length of the first dimension of each tensor; 1 for a tensor without dimensions."""
    rows = np.ones(len(table.ndims), dtype=np.int64)
    deep = table.ndims > 0
    rows[deep] = table.lengths[table.first_length[:-1][deep]]
    return rows


class IndexParts:
    """The indexes of several files. Each is made anew when it is asked for: all at once would take much memory."""

    def __init__(self, index: Index, numbers: Sequence[Ints]) -> None:
        """Split an index.

        Args:
            index: The whole index.
            numbers: For each file the numbers of its pieces, ascending.
        """
        self._index, self._numbers = index, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Index:
        index = self._index
        part = index.pieces.taken(self._numbers[number])
        used, tensors = np.unique(part.tensors, return_inverse=True)
        return Index(index.chunk_bytes, index.table.taken(used), index.packs, replace(part, tensors=tensors))


def split(index: Index, chunks_max: int) -> tuple[IndexParts, Overview]:
    """Return an index split into several of about `chunks_max` chunks each, and their overview.

    It splits by bands of rows first, then by runs of tensors. Bands keep each rank's share of the index small, both
    for ranks that hold a slice of every tensor and for ranks that hold whole layers.

    Args:
        index: The whole index; it has at least one piece.
        chunks_max: Approximate chunks of one file: a band of a run of tensors is never split.
    """
    pieces, table = index.pieces, index.table
    count = table.count
    files = max(int(pieces.first_chunk[-1]) // chunks_max, 1)
    # With more bands than pieces per tensor, most bands would be empty.
    bands = 1 << max(min(BANDS_MAX, files, pieces.count // count).bit_length() - 1, 0)
    runs = max(files // bands, 1)
    chunks_before = pieces.first_chunk[np.searchsorted(pieces.tensors, np.arange(count + 1))]
    run_of = np.minimum(chunks_before[:-1] * runs // max(int(chunks_before[-1]), 1), runs - 1)
    first_band, stop_band = bands_touched(pieces, table, bands)
    rows = _rows(table)
    all_bands = -(-rows // np.maximum(-(-rows // bands), 1))
    # Pieces that touch every band, or have no rows, go to one file of the run: every reader of the tensor needs them.
    spans_all = (first_band == bands) | ((first_band == 0) & (stop_band >= all_bands[pieces.tensors]))
    # A piece that spans many bands goes to a file for wide pieces, so that readers of one band skip it.
    level = np.searchsorted(2 << np.arange(bands.bit_length()), stop_band - first_band)
    levels = bands.bit_length()
    place = np.where(spans_all, levels * bands, level * bands + (first_band >> level))
    key = run_of[pieces.tensors] * (levels * bands + 1) + place
    order = np.argsort(key, kind="stable")
    first_band, stop_band, key, tensors = first_band[order], stop_band[order], key[order], pieces.tensors[order]
    cuts = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), pieces.count]
    spans = [
        (tensors[first], tensors[stop - 1] + 1, first_band[first:stop].min(), stop_band[first:stop].max())
        for first, stop in pairwise(cuts)
    ]
    parts = IndexParts(index, [order[first:stop] for first, stop in pairwise(cuts)])
    return parts, Overview(index.chunk_bytes, table, bands, np.array(spans, dtype=np.int64))


class _OverviewDocument(TensorsDocument):
    bands: int
    file_tensors_first: Column
    file_tensors_stop: Column
    file_bands_first: Column
    file_bands_stop: Column


_SPAN_COLUMNS = ("file_tensors_first", "file_tensors_stop", "file_bands_first", "file_bands_stop")
_DECODER = msgspec.msgpack.Decoder(_OverviewDocument)


def encode_overview(overview: Overview) -> bytes:
    """Return the bytes of an overview file."""
    spans: dict[str, Any] = dict(zip(_SPAN_COLUMNS, map(encode_column, overview.spans.T), strict=True))
    return msgspec.msgpack.encode(
        _OverviewDocument(chunk_bytes=overview.chunk_bytes, **overview.table.encoded(), bands=overview.bands, **spans)
    )


def decode_overview(data: bytes, files: int, where: str) -> Overview:
    """Return the overview in a file.

    Args:
        data: Content of the file.
        files: Number of index files that the manifest names.
        where: The file, for messages.
    Raises:
        CorruptError: The file is not an overview, or has an impossible value.
    """
    document = decode_msgpack(_DECODER, data, "an overview", where)
    if document.chunk_bytes < PAGE_BYTES or not 1 <= document.bands <= _BANDS_READ_MAX:
        raise CorruptError(
            f"{where}: chunk_bytes={document.chunk_bytes}, bands={document.bands}; expected at least {PAGE_BYTES} "
            f"bytes and 1 to {_BANDS_READ_MAX} bands. Read another copy"
        )
    table = decode_tensors(document, where)
    spans = np.stack([decode_column(getattr(document, name), where, files) for name in _SPAN_COLUMNS], axis=1)
    if (spans[:, 0] > spans[:, 1]).any() or (spans[:, 1] > table.count).any() or (spans[:, 2] > spans[:, 3]).any():
        raise CorruptError(f"{where}: an index file has an impossible range of tensors or bands. Read another copy")
    return Overview(document.chunk_bytes, table, document.bands, spans)
