"""The codec `sparse`: where elements are not zero, and what they are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.backends.codecs.scratch import scratch
from holdfast.backends.codecs.sections import bytes_of, element_count, require_taken, sections_of, stored_form
from holdfast.backends.codecs.zstd import decode_frame, repeats_frame
from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.ports.codec import Base, Coder, StoredPart
from holdfast.errors import CorruptError

_ZEROS_PER_VALUE_MIN = 3
"""Zero elements for each other one, so that the codec is worth trying."""


@dataclass(frozen=True, slots=True)
class _SparseCoder:
    """A bit for each element, and the elements that are not zero."""

    itemsize: int

    def encode(self, raw: memoryview, base: memoryview | None = None) -> list[StoredPart] | None:
        """Return the stored form, or None."""
        count = element_count(raw, self.itemsize)
        if not count:
            return None
        elements = _elements(raw, self.itemsize)
        is_value = elements != 0 if elements.ndim == 1 else (elements != 0).any(axis=1)
        values = int(np.count_nonzero(is_value))
        if values * (1 + _ZEROS_PER_VALUE_MIN) > count:
            return None
        bitmap = bytes_of(np.packbits(is_value, bitorder="little"))
        frame = repeats_frame(bitmap)
        shorter = frame if len(frame) < len(bitmap) else bitmap
        return stored_form([shorter, bytes_of(elements[is_value])], len(raw))

    def decode(self, stored: memoryview, base: memoryview | None, raw: memoryview) -> None:
        """Fill `raw`."""
        bitmap, values = sections_of(stored, 2, len(raw), self.itemsize)
        is_value = _bits_of(bitmap, len(raw) // self.itemsize)
        value_bytes = int(np.count_nonzero(is_value)) * self.itemsize
        if len(values) != value_bytes:
            raise CorruptError(f"values: {len(values)} bytes; expected {value_bytes}, as the bitmap says")
        elements = _elements(raw, self.itemsize)
        elements.fill(0)
        elements[is_value] = _elements(values, self.itemsize)


class SparseCodec:
    """Any element type, of which most elements are zero bits."""

    name = "sparse"
    base: Base = "none"

    def takes(self, dtype: str, base_dtype: str = "") -> bool:
        """Return whether it codes elements of a type."""
        return dtype in DTYPES and not base_dtype

    def coder(self, dtype: str, base_dtype: str = "") -> Coder:
        """Return the coder for elements of a type."""
        require_taken(self, dtype, base_dtype)
        return _SparseCoder(DTYPES[dtype].itemsize)


def _elements(data: memoryview, itemsize: int) -> NDArray[np.unsignedinteger]:
    """Return the bits of elements as whole numbers: two to a row if elements have 16 bytes."""
    if itemsize <= 8:
        return np.frombuffer(data, f"u{itemsize}")
    return np.frombuffer(data, np.uint64).reshape(-1, 2)


def _bits_of(section: memoryview, count: int) -> NDArray[np.bool_]:
    """Return which elements are values.

    Raises:
        CorruptError: The section holds no bitmap of so many elements.
    """
    bitmap_bytes = -(-count // 8)
    if len(section) > bitmap_bytes:
        raise CorruptError(f"bitmap: {len(section)} bytes; expected at most {bitmap_bytes}")
    bitmap = np.frombuffer(section, np.uint8)
    if len(section) < bitmap_bytes:
        bitmap = scratch("bitmap", bitmap_bytes)
        decode_frame(section, bitmap.data, "bitmap")
    bits = np.unpackbits(bitmap, bitorder="little")
    if bits[count:].any():
        raise CorruptError(f"bitmap: bits after the last of {count} elements; expected zeros")
    return bits[:count].view(np.bool_)
