"""The frame of every stored form: lengths, sections, padding. Lengths are checked before a section is looked at."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.base.ports.codec import GAIN_PARTS, RAW_PER_STORED_MAX, Codec, StoredPart
from holdfast.errors import CorruptError, InvalidError

_LENGTH_BYTES = 4

_Section = TypeVar("_Section", bound=StoredPart)


def require_taken(codec: Codec, dtype: str, base_dtype: str) -> None:
    """Refuse element types that a codec does not take.

    Raises:
        InvalidError: It does not take them.
    """
    if not codec.takes(dtype, base_dtype):
        against = f" against {base_dtype}" if base_dtype else ""
        raise InvalidError(f"codec {codec.name} does not code {dtype}{against}; ask `takes` first")


def bytes_of(array: NDArray[np.generic]) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data


def element_count(raw: memoryview, itemsize: int) -> int:
    """Return how many elements a chunk holds; 0 if it does not hold whole ones, so nothing is coded."""
    count, beyond = divmod(len(raw), itemsize)
    return 0 if beyond else count


def joined(sections: Sequence[_Section]) -> list[memoryview | _Section]:
    """Return the lengths of sections and the sections, without padding."""
    lengths = struct.pack(f"<{len(sections)}I", *(len(section) for section in sections))
    return [memoryview(lengths), *(section for section in sections if len(section))]


def stored_form(sections: Sequence[StoredPart], raw_bytes: int) -> list[StoredPart] | None:
    """Return a stored form in parts; None if it is not shorter than the chunk by 1/32.

    Args:
        sections: What the codec wrote.
        raw_bytes: Bytes of the chunk.
    """
    parts = joined(sections)
    total = sum(map(len, parts))
    padding = _shortest(raw_bytes) - total
    if padding > 0:
        parts.append(memoryview(bytes(padding)))
    gained = raw_bytes - max(total, total + padding)
    return parts if gained > 0 and gained * GAIN_PARTS >= raw_bytes else None


def split(stored: memoryview, count: int, what: str) -> tuple[list[memoryview], memoryview]:
    """Return sections and what follows them.

    Args:
        stored: Lengths and sections.
        count: How many sections.
        what: Names the whole in a message.
    Raises:
        CorruptError: The lengths claim more than there is.
    """
    start = count * _LENGTH_BYTES
    if len(stored) < start:
        raise CorruptError(f"{what}: {len(stored)} bytes; expected {start} bytes of lengths first")
    lengths = struct.unpack_from(f"<{count}I", stored)
    if sum(lengths) > len(stored) - start:
        raise CorruptError(
            f"{what}: sections of {', '.join(map(str, lengths))} bytes; expected {len(stored) - start} bytes in all"
        )
    sections = []
    for length in lengths:
        sections.append(stored[start : start + length])
        start += length
    return sections, stored[start:]


def sections_of(stored: memoryview, count: int, raw_bytes: int, itemsize: int) -> list[memoryview]:
    """Return the sections of a stored form whose lengths are sound.

    Args:
        stored: The stored form.
        count: How many sections it has.
        raw_bytes: Bytes of the chunk.
        itemsize: Bytes of one element.
    Raises:
        CorruptError: The form cannot be one of a chunk of this length.
    """
    if raw_bytes % itemsize:
        raise CorruptError(f"chunk of {raw_bytes} bytes; expected whole elements of {itemsize} bytes")
    shortest = _shortest(raw_bytes)
    if not shortest <= len(stored) < raw_bytes:
        raise CorruptError(
            f"stored form of {len(stored)} bytes for a chunk of {raw_bytes}; expected {shortest} to {raw_bytes - 1}"
        )
    sections, rest = split(stored, count, "stored form")
    if len(rest) and (len(stored) != shortest or np.frombuffer(rest, np.uint8).any()):
        raise CorruptError(
            f"stored form: {len(rest)} bytes after its sections; expected none, or zeros up to {shortest} bytes in all"
        )
    return sections


def _shortest(raw_bytes: int) -> int:
    """Return the fewest bytes in which a chunk may be stored."""
    return -(-raw_bytes // RAW_PER_STORED_MAX)
