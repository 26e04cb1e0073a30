"""The note of a coded piece in the header of its pack: how each of its chunks is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.chunking import chunk_count, chunk_range
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.types.plan import Coding, PackItem
from holdfast.core.format.codec_names import CODEC_BASES, needs_pair, require_known_codecs, used_codecs
from holdfast.core.format.coded_chunks import impossible_chunks, raw_lengths
from holdfast.errors import CorruptError
from holdfast.settings import MIB, PAGE_BYTES

CHUNK_BYTES_MAX = 4 * MIB
"""Largest chunk of one digest. It bounds the tensor bytes that a small index can claim."""

CODECS_MAX = 255
"""Most codecs that the pieces of an index or header name: a chunk has one byte for the number of its codec."""

_Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class CodedNote(msgspec.Struct):
    """The note of one piece, as JSON has it."""

    dtype: str
    codecs: Annotated[list[str], msgspec.Meta(max_length=CODECS_MAX)]
    chunks: list[Annotated[int, msgspec.Meta(ge=0, le=CODECS_MAX)]]
    lengths: list[Annotated[int, msgspec.Meta(ge=0, le=CHUNK_BYTES_MAX)]]
    box: tuple[tuple[_Whole, ...], tuple[_Whole, ...]] | None = None
    flat: tuple[_Whole, _Whole] | None = None
    pair: str = ""


def note_of(item: PackItem, coding: Coding) -> dict[str, object]:
    """Return the note of a piece."""
    codecs, numbers = used_codecs(coding.codecs, coding.numbers)
    lengths = [stop - start for start, stop in pairwise(coding.starts)]
    return _note(item, codecs, list(numbers), lengths, coding.pair_fqn if any(map(needs_pair, codecs)) else "")


def longest_note(item: PackItem, chunk_bytes: int) -> dict[str, object]:
    """Return a note as long as the longest that a piece without a pair may get.

    Args:
        item: The piece.
        chunk_bytes: Raw bytes of each chunk but the last.
    """
    ranges = [chunk_range(item.bytes, chunk_bytes, number) for number in range(chunk_count(item.bytes, chunk_bytes))]
    lengths = [stop - start for start, stop in ranges]  # No stored chunk is longer than its raw bytes.
    return _note(item, list(CODEC_BASES), [len(CODEC_BASES)] * len(lengths), lengths, "")


def _note(
    item: PackItem, codecs: Sequence[str], numbers: list[int], lengths: list[int], pair_fqn: str
) -> dict[str, object]:
    region = item.region
    return {
        "dtype": item.tensor.dtype,
        "flat" if isinstance(region, FlatRange) else "box": [region.start, region.stop],
        "codecs": codecs,
        "chunks": numbers,
        "lengths": lengths,
        **({"pair": pair_fqn} if pair_fqn else {}),
    }


def coded_piece(
    note: CodedNote, fqn: str, shape: tuple[int, ...], stored_bytes: int, chunk_bytes: int, where: str
) -> tuple[Region, Coding]:
    """Return the region and coding that a note states, every number checked.

    Args:
        note: The note, of an element type that is stored.
        fqn: The tensor.
        shape: Its global shape.
        stored_bytes: Bytes of the piece in the pack.
        chunk_bytes: Raw bytes of each chunk but the last.
        where: The pack, for messages.
    Raises:
        CorruptError: A number is impossible; the message names the tensor.
        InvalidError: A codec is of a newer version of the format.
    """
    region = _region_of(note, shape)
    require_known_codecs(note.codecs, f"{where}: {fqn}")
    numbers, lengths = np.array(note.chunks, dtype=np.uint8), np.array(note.lengths, dtype=np.int64)
    raw_bytes = region.numel * DTYPES[note.dtype].itemsize if region is not None else -1
    chunks = chunk_count(raw_bytes, chunk_bytes)
    is_possible = region is not None and len(numbers) == len(lengths) == chunks
    if is_possible:
        raw = raw_lengths(np.array([raw_bytes]), np.array([chunks]), chunk_bytes)
        is_possible = not impossible_chunks(raw, numbers, lengths).any() and int(lengths.sum()) == stored_bytes
    if region is None or not is_possible or max(note.chunks, default=0) > len(note.codecs):
        raise CorruptError(
            f"{where}: {fqn} of shape {shape} has {len(note.chunks)} chunks in {stored_bytes} bytes; expected one for "
            f"each {chunk_bytes} bytes of its {region}, and stored lengths that add up. Read another copy"
        )
    codecs, used = used_codecs(note.codecs, numbers.tobytes())
    is_paired = any(map(needs_pair, codecs))
    if is_paired and not note.pair:
        raise CorruptError(f"{where}: {fqn} is coded by {', '.join(codecs)}, but names no pair. Read another copy")
    starts = (0, *np.cumsum(lengths).tolist())
    return region, Coding(codecs, used, starts, note.pair if is_paired else "")


def chunk_bytes_in(text: object) -> int:
    """Return the bytes of a chunk that the header of a coded pack states.

    Raises:
        ValueError: It states none.
    """
    if not isinstance(text, str) or not text.isascii() or not text.isdecimal() or len(text) > len(str(CHUNK_BYTES_MAX)):
        raise ValueError(f"holdfast.chunk_bytes {str(text)[:80]!r}; expected a number of bytes")
    if not PAGE_BYTES <= int(text) <= CHUNK_BYTES_MAX or int(text) % PAGE_BYTES:
        raise ValueError(f"holdfast.chunk_bytes {text}; expected a multiple of {PAGE_BYTES} to {CHUNK_BYTES_MAX}")
    return int(text)


def _region_of(note: CodedNote, shape: tuple[int, ...]) -> Region | None:
    """Return the region of a note; None if it states none, or none inside the tensor."""
    if note.flat is not None:
        start, stop = note.flat
        return FlatRange(start, stop) if note.box is None and start <= stop <= math.prod(shape) else None
    if note.box is None or not len(note.box[0]) == len(note.box[1]) == len(shape):
        return None
    is_inside = all(a <= b <= length for a, b, length in zip(*note.box, shape, strict=True))
    return Box(*note.box) if is_inside else None
