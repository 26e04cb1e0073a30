"""Encode and decode an index file. Decoding checks every number."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from holdfast.base.geometry.chunking import DIGEST_BYTES
from holdfast.core.format.coded_notes import CHUNK_BYTES_MAX
from holdfast.core.format.index.coding_columns import Bools
from holdfast.core.format.index.coding_file import CodingDocument, coding_document, with_coding
from holdfast.core.format.index.columns import Ints, decode_column, encode_column, products
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.piece_columns import PieceColumns, bounds_of
from holdfast.core.format.index.tensor_table import Column, TensorsDocument, TensorTable, TensorTables, decode_tensors
from holdfast.core.format.names import is_coded_pack_name, is_file_url, is_pack_name, step_of_pack
from holdfast.core.format.sealed_json import decode_msgpack
from holdfast.errors import CorruptError
from holdfast.settings import PAGE_BYTES

_BOX, _FLAT = 0, 1
"""Kinds of pieces in the column `piece_kinds`."""

_OWN, _FILE, _STEP = "own", "file", "step"
"""Kinds of packs: written by this attempt, a file that another system wrote, or a pack of another step."""

INDEX_BYTES_MAX = 1 << 30
"""Readers refuse a larger index file or part as damaged, without reading it."""


class IndexDocument(TensorsDocument):
    """An index file. Columns `piece_*` have one entry for each piece, in order of tensor."""

    packs: list[tuple[str, str]]
    piece_tensors: Column
    piece_packs: Column
    piece_offsets: Column
    piece_starts: Column
    piece_stops: Column
    digests: bytes
    piece_kinds: Column | None = None
    coding: CodingDocument | UnsetType = UNSET


def document_of(index: Index) -> IndexDocument:
    """Return the document of an index."""
    pieces = index.pieces
    used, packs = np.unique(pieces.packs, return_inverse=True)
    by_name = sorted(range(len(used)), key=lambda number: index.packs[int(used[number])])
    number_of = np.empty(len(used), dtype=np.int64)
    number_of[by_name] = np.arange(len(used))
    return IndexDocument(
        chunk_bytes=index.chunk_bytes,
        **index.table.encoded(),
        packs=[(_kind_of(index.packs[int(used[number])]), index.packs[int(used[number])]) for number in by_name],
        piece_tensors=encode_column(pieces.tensors),
        piece_packs=encode_column(number_of[packs]),
        piece_offsets=encode_column(pieces.offsets),
        piece_starts=encode_column(pieces.starts),
        piece_stops=encode_column(pieces.stops),
        digests=bytes(pieces.digests),
        piece_kinds=encode_column(pieces.flat) if pieces.flat.any() else None,
        coding=coding_document(pieces.coding),
    )


def _kind_of(pack: str) -> str:
    if is_pack_name(pack):
        return _OWN
    return _STEP if step_of_pack(pack) is not None else _FILE


def index_of(
    document: IndexDocument, where: str, tables: TensorTables | None = None, *, unhashed: bool = False
) -> Index:
    """Return the index of a document, every number checked.

    Args:
        document: The document.
        where: The file, for messages.
        tables: Tensor tables that were decoded before.
        unhashed: Whether it indexes another system's files: without digests, with any file names.
    Raises:
        CorruptError: A count, name, shape or range is impossible; the message names it.
    """
    if not PAGE_BYTES <= document.chunk_bytes <= CHUNK_BYTES_MAX or document.chunk_bytes % PAGE_BYTES:
        expected = f"a multiple of {PAGE_BYTES}, at most {CHUNK_BYTES_MAX}"
        raise CorruptError(f"{where}: chunk_bytes={document.chunk_bytes}; expected {expected}. Read another copy")
    table = decode_tensors(document, where) if tables is None else tables.of(document, where)
    for kind, name in document.packs:
        if kind != _kind_of(name) or (kind == _FILE and not unhashed and not is_file_url(name)):
            raise CorruptError(
                f"{where}: pack {name[:200]!r} of kind {kind[:80]!r}; expected a pack of this checkpoint or of "
                "another step, or the URL of a file. Read another copy"
            )
    if len({name for _, name in document.packs}) < len(document.packs):
        # With two numbers for one pack, the check for pieces that share bytes would miss some.
        raise CorruptError(f"{where}: a pack is listed twice; expected each once. Read another copy")
    tensors = decode_column(document.piece_tensors, where)
    count = len(tensors)
    packs = decode_column(document.piece_packs, where, count)
    offsets = decode_column(document.piece_offsets, where, count)
    if count and (int(tensors.max()) >= table.count or int(packs.max()) >= len(document.packs)):
        raise CorruptError(f"{where}: a piece names a tensor or pack that is not listed. Read another copy")
    if (tensors[1:] < tensors[:-1]).any():
        raise CorruptError(f"{where}: pieces are not in the order of their tensors. Read another copy")
    flat = np.zeros(count, dtype=bool)
    if document.piece_kinds is not None:
        kinds = decode_column(document.piece_kinds, where, count)
        if count and int(kinds.max()) > _FLAT:
            raise CorruptError(
                f"{where}: a piece of kind {int(kinds.max())}; expected {_BOX} (box) or {_FLAT} (flat range). Read "
                "another copy"
            )
        flat = kinds == _FLAT
    widths = np.where(flat, 1, table.ndims[tensors])
    coordinates = int(widths.sum())
    starts = decode_column(document.piece_starts, where, coordinates)
    stops = decode_column(document.piece_stops, where, coordinates)
    _require_inside(table, tensors, flat, widths, starts, stops, where)
    piece_bytes = products(widths, stops - starts) * table.itemsizes[tensors]
    chunks = np.zeros(count, dtype=np.int64) if unhashed else -(-piece_bytes // document.chunk_bytes)
    _require_digests(table, tensors, chunks, len(document.digests), where)
    digests = memoryview(document.digests)
    coded = np.array([not unhashed and is_coded_pack_name(name) for _, name in document.packs], dtype=bool)[packs]
    pieces = PieceColumns(tensors, packs, offsets, flat, widths, starts, stops, piece_bytes, chunks, digests)
    pieces = with_coding(pieces, document.coding, coded, table, document.chunk_bytes, where)
    return Index(document.chunk_bytes, table, [name for _, name in document.packs], pieces)


def _require_inside(
    table: TensorTable, tensors: Ints, flat: Bools, widths: Ints, starts: Ints, stops: Ints, where: str
) -> None:
    """Refuse pieces that are not inside their tensors.

    Raises:
        CorruptError: The message names the first such piece.
    """
    outside = (starts > stops) | (stops > bounds_of(table, tensors, flat, widths))
    if outside.any():
        at = int(outside.argmax())
        spec = table.specs[table.fqns[int(np.repeat(tensors, widths)[at])]]
        raise CorruptError(
            f"{where}: {spec.fqn}: a piece from {int(starts[at])} to {int(stops[at])}; expected it inside "
            f"{spec.global_shape}. Read another copy"
        )


def _require_digests(table: TensorTable, tensors: Ints, chunks: Ints, digest_bytes: int, where: str) -> None:
    """Refuse digests that are fewer or more than the chunks of all pieces.

    Raises:
        CorruptError: There are too few or too many digests.
    """
    # Check the largest piece alone first: then the sum over all pieces cannot wrap around.
    if len(chunks) and int(chunks.max()) * DIGEST_BYTES > digest_bytes:
        fqn = table.fqns[int(tensors[int(chunks.argmax())])]
        raise CorruptError(f"{where}: {fqn}: digests end before the pieces do. Read another copy")
    expected = int(chunks.sum()) * DIGEST_BYTES
    if expected != digest_bytes:
        raise CorruptError(f"{where}: {digest_bytes} bytes of digests; expected {expected}. Read another copy")


_DECODER = msgspec.msgpack.Decoder(IndexDocument)


def encode_index(index: Index) -> bytes:
    """Return the bytes of one index file."""
    return msgspec.msgpack.encode(document_of(index))


def decode_index(data: bytes, where: str) -> Index:
    """Return the index in a file.

    Raises:
        CorruptError: The file is not an index, or has an impossible value.
    """
    return index_of(decode_msgpack(_DECODER, data, "an index", where), where)


def decode_unhashed(data: bytes, where: str) -> Index:
    """Return an index of another system's files, which has no digests; errors as `decode_index`."""
    return index_of(decode_msgpack(_DECODER, data, "an index", where), where, unhashed=True)
