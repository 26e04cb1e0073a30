"""The overview of a large index: every tensor, and which index file holds the pieces of which rows.

An index file holds a band of rows of a run of tensors. So a rank that wants a few rows of many tensors, or many rows
of a few, reads little of the index; what no layout asks for together is not kept together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np

from holdfast.errors import CorruptError
from holdfast.format.index.columns import Ints, decode_column, encode_column
from holdfast.format.index.index import Index
from holdfast.format.index.piece_columns import PieceColumns
from holdfast.format.index.tensor_table import Column, TensorsDocument, TensorTable, decode_tensors
from holdfast.geometry.box import Box
from holdfast.settings import PAGE_BYTES

BANDS_MAX = 128
"""Bands that a writer cuts the rows of tensors into: a rank of a large job wants one or two of them."""

_BANDS_READ_MAX = 4096
"""Bands that a reader believes."""


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """All tensors of a checkpoint, and what each index file covers."""

    chunk_bytes: int
    """Bytes of every chunk but the last of a piece."""

    table: TensorTable
    """Every tensor."""

    bands: int
    """Into how many bands rows are cut."""

    spans: Ints
    """What each index file covers, in the order of the manifest: first tensor and the one past the last, first band of
    their rows and the one past the last; shape (files, 4)."""

    def files_for(self, fqn: str, box: Box) -> list[int]:
        """Return the numbers of the index files that may list a piece which shares an element with a box."""
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
        """Refuse an index file that lists what it is not said to.

        Raises:
            CorruptError: A tensor is another than here, or a piece lies outside the file's span.
        """
        first_tensor, stop_tensor, first_band, stop_band = self.spans[number].tolist()
        if index.chunk_bytes != self.chunk_bytes:
            raise CorruptError(f"{where}: chunk_bytes={index.chunk_bytes}; the overview says {self.chunk_bytes}")
        for fqn, tensor in index.tensors.items():
            if self.table.specs.get(fqn) != tensor or not first_tensor <= self.table.numbers[fqn] < stop_tensor:
                raise CorruptError(f"{where}: lists {tensor}; the overview says nothing of that. Read another copy")
        first, stop = bands_touched(index.pieces, index.table, self.bands)
        outside = (first < first_band) | (stop > stop_band)
        if outside.any():
            fqn = list(index.tensors)[int(index.pieces.tensors[int(outside.argmax())])]
            raise CorruptError(
                f"{where}: a piece of {fqn} outside bands {first_band} to {stop_band} of its rows. Read another copy"
            )


def bands_touched(pieces: PieceColumns, table: TensorTable, bands: int) -> tuple[Ints, Ints]:
    """Return the first band of rows that each piece touches, and the one past the last.

    What has no rows to cut lies in a band of its own beyond the others, which those who want a few rows never ask for.
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
    """Return the length of the first dimension of each tensor; 1 where there is none."""
    rows = np.ones(len(table.ndims), dtype=np.int64)
    deep = table.ndims > 0
    rows[deep] = table.lengths[table.first_length[:-1][deep]]
    return rows


def split(index: Index, chunks_max: int) -> tuple[list[Index], Overview]:
    """Return an index as several of about `chunks_max` chunks each, and the overview of them.

    Bands come first: they are what keeps one rank's share of the index small, whether it holds a slice of everything
    or everything of a slice of the layers.

    Args:
        index: The whole; it has at least one piece.
        chunks_max: Chunks of one file, more or less: a band of a run of tensors stays together.
    """
    pieces, table = index.pieces, index.table
    count = table.count
    files = max(int(pieces.first_chunk[-1]) // chunks_max, 1)
    # More bands than most tensors have pieces would leave most of them empty.
    bands = 1 << max(min(BANDS_MAX, files, pieces.count // count).bit_length() - 1, 0)
    runs = max(files // bands, 1)
    chunks_before = pieces.first_chunk[np.searchsorted(pieces.tensors, np.arange(count + 1))]
    run_of = np.minimum(chunks_before[:-1] * runs // max(int(chunks_before[-1]), 1), runs - 1)
    first_band, stop_band = bands_touched(pieces, table, bands)
    rows = _rows(table)
    all_bands = -(-rows // np.maximum(-(-rows // bands), 1))
    # What touches every band of its tensor, and what has none, lies apart: whoever wants a row of it reads it anyway.
    apart = (first_band == bands) | ((first_band == 0) & (stop_band >= all_bands[pieces.tensors]))
    # The further a piece reaches, the wider the file it lies in: else it would be read with every band that it is near.
    level = np.searchsorted(2 << np.arange(bands.bit_length()), stop_band - first_band)
    levels = bands.bit_length()
    place = np.where(apart, levels * bands, level * bands + (first_band >> level))
    key = run_of[pieces.tensors] * (levels * bands + 1) + place
    order = np.argsort(key, kind="stable")
    by_file = pieces.taken(order)
    first_band, stop_band, key = first_band[order], stop_band[order], key[order]
    cuts = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), pieces.count]
    parts, spans = [], []
    for first, stop in pairwise(cuts):
        part = by_file.between(first, stop)
        used, tensors = np.unique(part.tensors, return_inverse=True)
        parts.append(Index(index.chunk_bytes, table.taken(used), index.packs, replace(part, tensors=tensors)))
        spans.append((used[0], used[-1] + 1, first_band[first:stop].min(), stop_band[first:stop].max()))
    return parts, Overview(index.chunk_bytes, table, bands, np.array(spans, dtype=np.int64))


class _OverviewDocument(TensorsDocument):
    bands: int
    file_tensors_first: Column
    file_tensors_stop: Column
    file_bands_first: Column
    file_bands_stop: Column


_DECODER = msgspec.msgpack.Decoder(_OverviewDocument)


def encode_overview(overview: Overview) -> bytes:
    """Return the bytes of an overview file."""
    tensors_first, tensors_stop, bands_first, bands_stop = map(encode_column, overview.spans.T)
    return msgspec.msgpack.encode(
        _OverviewDocument(
            chunk_bytes=overview.chunk_bytes,
            **overview.table.encoded(),
            bands=overview.bands,
            file_tensors_first=tensors_first,
            file_tensors_stop=tensors_stop,
            file_bands_first=bands_first,
            file_bands_stop=bands_stop,
        )
    )


def decode_overview(data: bytes, files: int, where: str) -> Overview:
    """Return the overview that a file holds.

    Args:
        data: The file.
        files: How many index files the manifest names.
        where: The file, for messages.
    Raises:
        CorruptError: It is not an overview, or not a possible one.
    """
    try:
        found = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptError(f"{where}: not an overview of format 1 ({error})") from error
    if found.chunk_bytes < PAGE_BYTES or not 1 <= found.bands <= _BANDS_READ_MAX:
        raise CorruptError(f"{where}: chunk_bytes={found.chunk_bytes}, bands={found.bands}; expected possible ones")
    table = decode_tensors(found, where)
    columns = (found.file_tensors_first, found.file_tensors_stop, found.file_bands_first, found.file_bands_stop)
    spans = np.stack([decode_column(column, where, files) for column in columns], axis=1)
    if (spans[:, 0] > spans[:, 1]).any() or (spans[:, 1] > table.count).any() or (spans[:, 2] > spans[:, 3]).any():
        raise CorruptError(f"{where}: an index file of a range of tensors or bands that cannot be. Read another copy")
    return Overview(found.chunk_bytes, table, found.bands, spans)
