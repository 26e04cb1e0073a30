"""Encode and decode what an index file says of coded pieces. Decoding checks every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from holdfast.core.format.codec_names import require_known_codecs
from holdfast.core.format.coded_chunks import impossible_chunks, raw_lengths
from holdfast.core.format.coded_notes import CODECS_MAX
from holdfast.core.format.index.coding_columns import Bools, CodingColumns
from holdfast.core.format.index.columns import Ints, decode_column, encode_column
from holdfast.core.format.index.piece_columns import PieceColumns
from holdfast.core.format.index.tensor_table import Column, TensorTable
from holdfast.errors import CorruptError

_LENGTH_MAX = (1 << 32) - 1


class CodingDocument(msgspec.Struct):
    """The field `coding` of an index. Columns are by coded piece, or by chunk of the coded pieces."""

    codecs: Annotated[list[str], msgspec.Meta(max_length=CODECS_MAX)]
    chunk_codecs: bytes
    chunk_lengths: Column
    pairs: list[str]
    piece_pairs: Column


def coding_document(coding: CodingColumns | None) -> CodingDocument | UnsetType:
    """Return the document of coded pieces; unset if there are none."""
    if coding is None or not coding.coded.any():
        return UNSET
    codecs, codec_numbers = _renumbered(coding.codecs, np.unique(coding.numbers))
    pair_fqns, pair_numbers = _renumbered(coding.pair_fqns, np.unique(coding.pairs))
    return CodingDocument(
        codecs=codecs,
        chunk_codecs=codec_numbers.astype(np.uint8)[coding.numbers].tobytes(),
        chunk_lengths=encode_column(coding.lengths),
        pairs=pair_fqns,
        piece_pairs=encode_column(pair_numbers[coding.pairs[coding.coded]]),
    )


def _renumbered(names: Sequence[str], used: Ints) -> tuple[list[str], Ints]:
    """Return the used names, ascending, and the new number of each old one; numbers count from 1 on."""
    numbers = [number for number in used.tolist() if number]
    ordered = sorted(numbers, key=lambda number: names[number - 1])
    table = np.zeros(len(names) + 1, dtype=np.int64)
    table[ordered] = np.arange(1, len(ordered) + 1)
    return [names[number - 1] for number in ordered], table


def with_coding(
    pieces: PieceColumns,
    document: CodingDocument | UnsetType,
    coded: Bools,
    table: TensorTable,
    chunk_bytes: int,
    where: str,
) -> PieceColumns:
    """Return pieces with what a document says of their coding, every number checked.

    Args:
        pieces: The pieces, as if none was coded.
        document: The document, if the index has one.
        coded: Whether the pack of a piece is one of coded pieces.
        table: The tensors.
        chunk_bytes: Raw bytes of each chunk but the last of a piece.
        where: The file, for messages.
    Raises:
        CorruptError: A count, number or length is impossible.
        InvalidError: A codec is of a newer version of the format.
    """
    if isinstance(document, UnsetType):
        if coded.any():
            raise CorruptError(f"{where}: a piece in a coded pack, but no coding. Read another copy")
        return pieces
    if not coded.any():
        raise CorruptError(f"{where}: codings of no piece; expected a piece in a coded pack. Read another copy")
    for kind, names in (("codec", document.codecs), ("pair", document.pairs)):
        if len(set(names)) < len(names) or "" in names:
            raise CorruptError(f"{where}: a {kind} is listed twice, or has no name. Read another copy")
    require_known_codecs(document.codecs, where)
    chunks = np.where(coded, pieces.chunks, 0)
    count = int(chunks.sum())
    if len(document.chunk_codecs) != count:
        raise CorruptError(
            f"{where}: codecs of {len(document.chunk_codecs)} chunks; expected {count}. Read another copy"
        )
    lengths = decode_column(document.chunk_lengths, where, count)
    pairs = np.zeros(pieces.count, dtype=np.int64)
    pairs[coded] = decode_column(document.piece_pairs, where, int(coded.sum()))
    numbers = np.frombuffer(document.chunk_codecs, np.uint8)
    if int(numbers.max(initial=0)) > len(document.codecs) or int(pairs.max()) > len(document.pairs):
        raise CorruptError(f"{where}: a chunk or piece names a codec or pair that is not listed. Read another copy")
    coding = CodingColumns(
        codecs=tuple(document.codecs),
        pair_fqns=tuple(document.pairs),
        coded=coded,
        pairs=pairs,
        chunks=chunks,
        numbers=numbers,
        lengths=np.minimum(lengths, _LENGTH_MAX).astype(np.uint32),
    )
    found = replace(pieces, coding=coding)
    # By the lengths as they were stored: among shorter numbers, a large one might pass for another.
    _require_lengths(found, coding, lengths, table, chunk_bytes, where)
    _require_pairs_where_needed(found, coding, table, where)
    return found


def _require_lengths(
    pieces: PieceColumns, coding: CodingColumns, lengths: Ints, table: TensorTable, chunk_bytes: int, where: str
) -> None:
    """Refuse chunks whose stored bytes are too many or too few.

    Raises:
        CorruptError: The message names the tensor of the first such chunk.
    """
    raw = raw_lengths(pieces.bytes[coding.coded], coding.chunks[coding.coded], chunk_bytes)
    wrong = impossible_chunks(raw, coding.numbers, lengths)
    if wrong.any():
        at = int(wrong.argmax())
        piece = int(np.searchsorted(coding.first_chunk, at, side="right")) - 1
        raise CorruptError(
            f"{where}: {table.fqns[int(pieces.tensors[piece])]}: a chunk of {int(lengths[at])} stored bytes, codec "
            f"{int(coding.numbers[at])}; expected all raw bytes and codec 0, or fewer, but at least one for each 4096. "
            "Read another copy"
        )


def _require_pairs_where_needed(pieces: PieceColumns, coding: CodingColumns, table: TensorTable, where: str) -> None:
    """Refuse a piece with a chunk that needs a pair but names none, and one that names a pair for nothing.

    Raises:
        CorruptError: The message names the first such piece.
    """
    needed = np.zeros(pieces.count, dtype=bool)
    needed[np.searchsorted(coding.first_chunk, np.flatnonzero(coding.paired_chunks()), side="right") - 1] = True
    wrong = needed != (coding.pairs > 0)
    if wrong.any():
        at = int(wrong.argmax())
        fqn, found = table.fqns[int(pieces.tensors[at])], "no pair"
        if not needed[at]:
            found = f"a pair {coding.pair_fqns[int(coding.pairs[at]) - 1][:200]}"
        raise CorruptError(
            f"{where}: {fqn} names {found}; expected one exactly where a chunk is coded against it. Read another copy"
        )
