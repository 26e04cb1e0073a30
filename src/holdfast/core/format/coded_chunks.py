"""What the stored bytes of a chunk may be, and how they become its raw bytes. Bounds are checked before decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.chunking import pair_range
from holdfast.base.geometry.dtype import DTYPES, MASTER_TYPE, WEIGHT_TYPES
from holdfast.base.ports.codec import RAW_PER_STORED_MAX, Codecs
from holdfast.base.types.plan import Piece
from holdfast.core.format.codec_names import needs_pair, require_known_codecs
from holdfast.errors import CorruptError

PAIR_RATIO = DTYPES[MASTER_TYPE].itemsize // DTYPES[WEIGHT_TYPES[0]].itemsize
"""Bytes of a chunk of a master for one byte of its weight: only masters are coded against a pair."""


def raw_lengths(piece_bytes: NDArray[np.int64], chunks: NDArray[np.int64], chunk_bytes: int) -> NDArray[np.int64]:
    """Return the raw bytes of each chunk of several pieces, piece after piece.

    Args:
        piece_bytes: Raw bytes of each piece.
        chunks: Number of chunks of each piece.
        chunk_bytes: Raw bytes of each chunk but the last of a piece.
    """
    lengths = np.full(int(chunks.sum()), chunk_bytes, dtype=np.int64)
    filled = chunks > 0
    lengths[np.cumsum(chunks[filled]) - 1] = piece_bytes[filled] - (chunks[filled] - 1) * chunk_bytes
    return lengths


def impossible_chunks(raw: NDArray[np.int64], numbers: NDArray[np.uint8], stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which chunks have a length that no writer gives them.

    Args:
        raw: Raw bytes of each chunk.
        numbers: 0 for a chunk that is stored raw, else the number of its codec.
        stored: Its stored bytes.
    """
    coded = (stored >= 1) & (stored < raw) & (raw <= RAW_PER_STORED_MAX * stored)
    possible: NDArray[np.bool_] = np.where(numbers > 0, coded, stored == raw)
    return ~possible


def base_number(piece: Piece, number: int) -> int | None:
    """Return the number of the chunk of the pair that a chunk is coded against; None if it is coded against none."""
    if not needs_pair(piece.codec_of(number)):
        return None
    return pair_range(piece.chunk_bytes, number, 0, PAIR_RATIO)[0]


def decode_chunk(
    piece: Piece,
    number: int,
    stored: memoryview,
    base: memoryview | None,
    raw: memoryview,
    codecs: Codecs,
    where: str,
) -> None:
    """Fill `raw` with the raw bytes of a stored chunk. The caller compares their digest.

    Args:
        piece: The piece of the chunk.
        number: Number of the chunk in the piece.
        stored: Its stored bytes, all of them.
        base: Raw bytes of the whole chunk `base_number` of the pair; None if there is none.
        raw: Writable memory, as long as the chunk. After an error its content is undefined.
        codecs: The codecs by name.
        where: The pack, for messages.
    Raises:
        CorruptError: The stored bytes are no chunk of this length; the message names tensor, pack, range and chunk.
        InvalidError: The codec is of a newer version of the format.
    """
    name = piece.codec_of(number)
    start, stop = piece.stored_range(number)
    place = f"{where}: {piece.tensor.fqn}, chunk {number} at bytes {start}–{stop}"
    length = min(piece.chunk_bytes, piece.bytes - number * piece.chunk_bytes)
    if len(stored) != stop - start or len(raw) != length:
        raise CorruptError(
            f"{place}: {len(stored)} stored bytes for {len(raw)} raw ones; expected {stop - start} for {length}. Read "
            "another copy"
        )
    if not name:
        if len(stored) != length:  # numpy would repeat a single byte.
            raise CorruptError(f"{place}: {len(stored)} bytes of a raw chunk; expected {length}. Read another copy")
        # numpy releases Python's lock, so that other threads copy and decode meanwhile.
        np.copyto(np.frombuffer(raw, np.uint8), np.frombuffer(stored, np.uint8))
        return
    require_known_codecs([name], place)
    if not 0 < length <= RAW_PER_STORED_MAX * len(stored):
        raise CorruptError(
            f"{place}: {len(stored)} stored bytes of {length}; expected at least one for {RAW_PER_STORED_MAX}. Read "
            "another copy"
        )
    codec = codecs[name]
    part, base_dtype = _part_of_base(piece, number, base, length, place) if needs_pair(name) else (None, "")
    if not codec.takes(piece.tensor.dtype, base_dtype):
        against = f" against {base_dtype}" if base_dtype else ""
        raise CorruptError(f"{place}: coded by {name}, which takes no {piece.tensor.dtype}{against}. Read another copy")
    coder = codec.coder(piece.tensor.dtype, base_dtype)
    try:
        coder.decode(stored, part, raw)
    except CorruptError as error:
        raise CorruptError(f"{place}: coded by {name}: {error}. Read another copy") from error


def _part_of_base(
    piece: Piece, number: int, base: memoryview | None, length: int, place: str
) -> tuple[memoryview, str]:
    """Return the bytes of a pair's chunk that a chunk is coded against, and their element type.

    Raises:
        CorruptError: There is no such chunk, or it is too short.
    """
    pair = piece.coding.pair if piece.coding is not None else None
    if pair is None or base is None:
        raise CorruptError(
            f"{place}: coded by {piece.codec_of(number)} without the chunk of its pair. Read another copy"
        )
    _, start, stop = pair_range(piece.chunk_bytes, number, length, PAIR_RATIO)
    if stop > len(base):
        raise CorruptError(
            f"{place}: needs bytes {start}–{stop} of a chunk of {pair.tensor.fqn}; found {len(base)}. Read another copy"
        )
    return base[start:stop], pair.tensor.dtype
