"""The codec `planes`: exponents apart from the rest, since trained numbers use few exponents and all mantissas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.codecs.byte_planes import (
    BLOCK,
    WORTH_CODING_BITS,
    Bytes,
    coded_low_halves,
    coded_plane,
    coded_rest,
    plane_of,
    rest_of,
    sampled_bits,
)
from holdfast.backends.codecs.float_halves import fill_upper_halves
from holdfast.backends.codecs.packed_bytes import evens_of, packed_evens
from holdfast.backends.codecs.scratch import lent, scratch
from holdfast.backends.codecs.sections import bytes_of, element_count, require_taken, sections_of, stored_form
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Base, Coder, StoredPart
from holdfast.errors import CorruptError

_NOTHING = memoryview(b"")

_TYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class _PlanesCoder:
    """Elements of 2, 4 or 8 bytes: upper bytes, middle bytes, rest."""

    itemsize: int

    def encode(self, raw: memoryview, base: memoryview | None = None) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        count = element_count(raw, self.itemsize)
        if not count:
            return None
        upper, middle, is_any_negative = _split(raw, self.itemsize)
        first = coded_plane(upper, sampled=False)
        # The next chunk of this thread overwrites the plane; a stored form is the caller's.
        sections: list[StoredPart] = [first if len(first) < count else bytes_of(upper.copy())]
        if is_any_negative or sampled_bits(middle) < WORTH_CODING_BITS - 1:
            sections += [coded_plane(middle), _NOTHING]
        else:
            sections += [_NOTHING, bytes_of(packed_evens(middle))]
        if self.itemsize == 4:
            sections.append(coded_low_halves(np.frombuffer(raw, np.uint32)))
        elif self.itemsize == 8:
            sections.append(coded_rest(_lower_bytes(raw)))
        return stored_form(sections, len(raw))

    def decode(self, stored: memoryview, base: memoryview | None, raw: memoryview) -> None:
        """Fill `raw`."""
        itemsize = self.itemsize
        sections = sections_of(stored, 3 if itemsize == 2 else 4, len(raw), itemsize)
        count = len(raw) // itemsize
        upper = plane_of(sections[0], count, "plane of upper bytes")
        if len(sections[1]):
            middle = plane_of(sections[1], count, "plane of middle bytes")
            if len(sections[2]):
                raise CorruptError(f"plane of middle bytes: packed, too, in {len(sections[2])} bytes; expected none")
        else:
            middle = evens_of(sections[2], count, "packed plane of middle bytes")
        if itemsize == 2:
            for start in range(0, count, BLOCK):
                block = slice(start, start + BLOCK)
                _join_upper(upper[block], middle[block], np.frombuffer(raw, np.uint16)[block])
            return
        rest = rest_of(sections[3], count, itemsize - 2, "plane of low bytes")
        halves = scratch("halves", 2 * min(count, BLOCK)).view(np.uint16)
        for start in range(0, count, BLOCK):
            block = slice(start, min(start + BLOCK, count))
            half = halves[: block.stop - start]
            _join_upper(upper[block], middle[block], half)
            _join_rest(half, rest[block], raw[start * itemsize : block.stop * itemsize])


class PlanesCodec:
    """Floating-point numbers."""

    name = "planes"
    base: Base = "none"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        """Return whether it codes elements of a type."""
        return dtype in _TYPES and not base_dtype

    def coder(self, dtype: str, base_dtype: str = "") -> Coder:
        """Return the coder for elements of a type."""
        require_taken(self, dtype, base_dtype)
        return _PlanesCoder(DTYPES[dtype].itemsize)


def _split(raw: memoryview, itemsize: int) -> tuple[Bytes, Bytes, bool]:
    """Return the two upper bytes of elements as planes, after the sign moved to the lowest bit of the two.

    Only operations that numpy has vector instructions for: shifting 16-bit numbers to the left is not one.

    Args:
        raw: The elements.
        itemsize: Bytes of one element.
    Returns:
        The plane of upper bytes, memory of this thread; the plane of middle bytes; whether any element is negative.
    """
    count = len(raw) // itemsize
    upper, middle = scratch("upper bytes", count), lent(count)
    is_any_negative = False
    for start in range(0, count, BLOCK):
        block = slice(start, min(start + BLOCK, count))
        some = raw[start * itemsize : block.stop * itemsize]
        halves = _upper_halves(some, itemsize)
        np.right_shift(halves, 7, out=upper[block], casting="unsafe")
        low, signs = middle[block], scratch("signs", len(halves))
        np.copyto(low, halves, casting="unsafe")
        np.add(low, low, out=low)
        np.less(halves.view(np.int16), 0, out=signs.view(np.bool_))
        if is_any_negative or signs.any():
            is_any_negative = True
            np.add(low, signs, out=low)
    return upper, middle, is_any_negative


def _upper_halves(raw: memoryview, itemsize: int) -> NDArray[np.uint16]:
    """Return the two upper bytes of each element: the elements themselves, or memory of this thread."""
    if itemsize == 2:
        return np.frombuffer(raw, np.uint16)
    halves = scratch("upper halves", 2 * (len(raw) // itemsize)).view(np.uint16)
    fill_upper_halves(np.frombuffer(raw, f"u{itemsize}"), halves)
    return halves


def _lower_bytes(raw: memoryview) -> Bytes:
    """Return all bytes of elements of 8 but the two upper ones; a row for each element, its lowest byte first."""
    quarters = np.frombuffer(raw, np.uint16).reshape(-1, 4)
    rest = lent(6 * len(quarters))
    np.copyto(rest.view(np.uint16).reshape(-1, 3), quarters[:, :3])
    return rest.reshape(-1, 6)


def _join_upper(upper: Bytes, middle: Bytes, halves: NDArray[np.uint16]) -> None:
    """Fill 16-bit halves from their two planes: the reverse of what `_split` does to them."""
    turned = scratch("turned halves", 2 * len(upper)).view(np.uint16)
    np.multiply(upper, 256, out=turned, dtype=np.uint16)
    np.bitwise_or(turned, middle, out=turned)
    np.right_shift(turned, 1, out=halves)
    np.multiply(turned, 1 << 15, out=turned)
    np.bitwise_or(halves, turned, out=halves)


def _join_rest(halves: NDArray[np.uint16], rest: Bytes, raw: memoryview) -> None:
    """Fill elements from their upper halves and the rest: the reverse of cutting it off.

    Args:
        halves: The two upper bytes of each element.
        rest: A row for each element.
        raw: The elements, of 4 or 8 bytes.
    """
    low = rest.reshape(-1).view(np.uint16)
    if rest.shape[1] == 2:
        elements = np.frombuffer(raw, np.uint32)
        np.left_shift(halves, 16, out=elements, dtype=np.uint32)
        np.bitwise_or(elements, low, out=elements)
        return
    quarters = np.frombuffer(raw, np.uint16).reshape(-1, 4)
    quarters[:, 3] = halves
    quarters[:, :3] = low.reshape(-1, 3)
