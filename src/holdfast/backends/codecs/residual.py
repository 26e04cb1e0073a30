"""The codec `residual`: of float32 masters it stores what their 16-bit weights lack, the bits that rounding dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.codecs.byte_planes import BLOCK, coded_low_halves, coded_rest, rest_of
from holdfast.backends.codecs.float_halves import fill_lower_halves, round_to_bfloat16
from holdfast.backends.codecs.scratch import lent, scratch
from holdfast.backends.codecs.sections import bytes_of, element_count, require_taken, sections_of, stored_form
from holdfast.base.ports.codec import Base, PairCoder, Rounded, StoredPart
from holdfast.errors import CorruptError

_DROPPED_BITS = {"bfloat16": 16, "float16": 13}
"""Mantissa bits that a float32 has more, by the type of the pair."""

_HALF_BIAS = 112 << 10
"""Added to the bits of a float16, without the sign, it gives the upper bits of the same number as a float32."""

_ENTRY_BYTES = 4


@dataclass(frozen=True, slots=True)
class _RoundedChunk:
    """A chunk that was rounded to bfloat16."""

    raw: memoryview
    base: memoryview
    places: NDArray[np.uint32]
    """The elements whose upper bits are stated."""

    def encode(self) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        elements = np.frombuffer(self.raw, np.uint32)
        return _stored(elements, lambda: coded_low_halves(elements), self.places, _DROPPED_BITS["bfloat16"])


@dataclass(frozen=True, slots=True)
class _CastChunk:
    """A chunk that was cast to float16."""

    coder: _ResidualCoder
    raw: memoryview
    base: memoryview

    def encode(self) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        return self.coder.encode(self.raw, self.base)


@dataclass(frozen=True, slots=True)
class _ResidualCoder:
    """float32 numbers against the same numbers rounded to 16 bits."""

    base_dtype: str

    def encode(self, raw: memoryview, base: memoryview | None = None) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        count = element_count(raw, 4)
        if not count:
            return None
        assert base is not None and len(base) == 2 * count, "a pair has as many elements"
        elements, pair = np.frombuffer(raw, np.uint32), np.frombuffer(base, np.uint16)
        dropped = _DROPPED_BITS[self.base_dtype]
        rest = lent(2 * count)
        low = rest.view(np.uint16)
        found = []
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            some = elements[block]
            fill_lower_halves(some, low[block])
            if dropped < 16:
                low[block] &= (1 << dropped) - 1
            upper = _predicted(pair[block], low[block], dropped)
            actual = scratch("actual upper bits", upper.nbytes).view(upper.dtype)
            np.right_shift(some, dropped, out=actual, casting="unsafe")
            differs = scratch("differs", len(upper)).view(np.bool_)
            np.not_equal(actual, upper, out=differs)
            found.append(np.flatnonzero(differs) + start)
        places = np.concatenate(found).astype(np.uint32)
        return _stored(elements, lambda: coded_rest(rest.reshape(-1, 2)), places, dropped)

    def rounded(self, raw: memoryview) -> Rounded:
        """Return a chunk apart: one pass instead of two, over the memory that takes most of the time."""
        elements = np.frombuffer(raw, np.uint32)
        count = len(elements)
        if self.base_dtype != "bfloat16":
            with np.errstate(over="ignore", invalid="ignore"):
                return _CastChunk(self, raw, bytes_of(elements.view(np.float32).astype(np.float16)))
        base = scratch("rounded", 2 * count)
        upper = base.view(np.uint16)
        found = [np.empty(0, np.intp)]
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            some = elements[block]
            low = scratch("dropped", 2 * len(some)).view(np.uint16)
            differs = scratch("differs", len(some)).view(np.bool_)
            found.append(round_to_bfloat16(some, upper[block], low, differs) + start)
        return _RoundedChunk(raw, base.data, np.concatenate(found).astype(np.uint32))

    def decode(self, stored: memoryview, base: memoryview | None, raw: memoryview) -> None:
        """Fill `raw`."""
        sections = sections_of(stored, 3, len(raw), 4)
        count = len(raw) // 4
        if base is None or len(base) != 2 * count:
            raise CorruptError(f"pair of {0 if base is None else len(base)} bytes; expected {2 * count}")
        places, uppers = _exceptions(sections[1], sections[2], count)
        low = rest_of(sections[0], count, 2, "plane of low bits").reshape(-1).view(np.uint16)
        dropped = _DROPPED_BITS[self.base_dtype]
        if dropped < 16 and (low >> dropped).any():
            raise CorruptError(f"plane of low bits: a value of {int(low.max())}; expected less than {1 << dropped}")
        pair, elements = np.frombuffer(base, np.uint16), np.frombuffer(raw, np.uint32)
        for start in range(0, count, BLOCK):
            block = slice(start, start + BLOCK)
            some = elements[block]
            np.left_shift(_predicted(pair[block], low[block], dropped), dropped, out=some, dtype=np.uint32)
            np.bitwise_or(some, low[block], out=some)
        elements[places] = uppers << dropped | low[places]


class ResidualCodec:
    """float32 numbers whose pair is bfloat16 or float16."""

    name = "residual"
    base: Base = "pair"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        """Return whether it codes elements of a type."""
        return dtype == "float32" and base_dtype in _DROPPED_BITS

    def coder(self, dtype: str, base_dtype: str = "") -> PairCoder:
        """Return the coder for elements of a type."""
        require_taken(self, dtype, base_dtype)
        return _ResidualCoder(base_dtype)


def _stored(
    elements: NDArray[np.uint32], rest: Callable[[], StoredPart], places: NDArray[np.uint32], dropped: int
) -> list[StoredPart] | None:
    """Return the stored form, or None.

    Args:
        elements: The chunk.
        rest: Returns the bits of each element that rounding dropped, as they are stored.
        places: The elements whose upper bits are stated.
        dropped: How many bits were dropped.
    """
    raw_bytes = elements.nbytes
    if not raw_bytes or 2 * _ENTRY_BYTES * len(places) > raw_bytes // 2:
        return None
    uppers = elements[places] >> dropped
    return stored_form([rest(), bytes_of(places), bytes_of(uppers)], raw_bytes)


def _predicted(pair: NDArray[np.uint16], low: NDArray[np.uint16], dropped: int) -> NDArray[np.unsignedinteger]:
    """Return the upper bits that float32 numbers have which were rounded to their pair: memory of this thread.

    A number whose low bits are more than half of a step was rounded up: its upper bits are one less. Exactly half may
    have gone either way; it counts as rounded down.

    Args:
        pair: The rounded numbers.
        low: The bits that rounding dropped.
        dropped: How many those are.
    """
    count = len(pair)
    rounded_up = scratch("rounded up", count).view(np.bool_)
    np.greater(low, 1 << (dropped - 1), out=rounded_up)
    if dropped == 16:
        return np.subtract(pair, rounded_up, out=scratch("predicted", 2 * count).view(np.uint16))
    upper, more = scratch("predicted", 4 * count).view(np.uint32), scratch("bias or sign", 4 * count).view(np.uint32)
    np.bitwise_and(pair, 0x7FFF, out=upper)
    np.not_equal(upper, 0, out=more)
    np.multiply(more, _HALF_BIAS, out=more)
    upper += more
    np.right_shift(pair, 15, out=more)
    np.left_shift(more, 18, out=more)
    upper |= more
    upper -= rounded_up
    upper &= (1 << 19) - 1
    return upper


def _exceptions(places: memoryview, uppers: memoryview, count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the elements whose upper bits are stated, and what they are.

    Raises:
        CorruptError: The lists differ in length, or name an element that the chunk does not have.
    """
    if len(places) % _ENTRY_BYTES or len(places) != len(uppers):
        raise CorruptError(
            f"exceptions: {len(places)} bytes of places for {len(uppers)} of bits; expected as many of each"
        )
    at, bits = np.frombuffer(places, np.uint32), np.frombuffer(uppers, np.uint32)
    if len(at) and int(at.max()) >= count:
        raise CorruptError(f"exceptions: names element {int(at.max())}; expected less than {count}")
    return at, bits
