"""Counts NaN and infinite elements in raw bytes, while the processor's cache holds them.

A non-finite element has all bits of its exponent set. Read as integers, its bits are at least the exponent mask: as a
signed integer if the element is positive, as an unsigned one if it is negative. So two maxima, taken at memory speed
and without a copy, show that there is none. Elements are counted only if a maximum shows one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from holdfast.base.types.plan import PackItem


@dataclass(frozen=True, slots=True)
class _Encoding:
    """How an element type encodes non-finite numbers."""

    bits: int
    """Bits of one number; a complex element has two numbers."""

    mask: int
    """Bits that are all set in a non-finite number."""

    parts: int = 1
    """Numbers in an element."""


_ENCODINGS = {
    "float16": _Encoding(16, 0x7C00),
    "bfloat16": _Encoding(16, 0x7F80),
    "float32": _Encoding(32, 0x7F80_0000),
    "float64": _Encoding(64, 0x7FF0_0000_0000_0000),
    "complex32": _Encoding(16, 0x7C00, parts=2),
    "complex64": _Encoding(32, 0x7F80_0000, parts=2),
    "complex128": _Encoding(64, 0x7FF0_0000_0000_0000, parts=2),
    "float8_e5m2": _Encoding(8, 0x7C),
    # No infinity; NaN has all bits set except the sign, which is either.
    "float8_e4m3fn": _Encoding(8, 0x7F),
}
_ONE_NAN = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
"""Types without infinity, with the byte of their only NaN: of a negative zero, or of the largest exponent."""


def nonfinite_count(dtype: str, data: bytes | memoryview) -> int:
    """Return how many elements are NaN or infinite; a complex element counts once if either part is.

    Args:
        dtype: Element type by name.
        data: Whole elements.
    """
    if dtype in _ONE_NAN:
        return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _ONE_NAN[dtype]))
    encoding = _ENCODINGS.get(dtype)
    if encoding is None or not len(data):
        return 0
    unsigned = np.frombuffer(data, f"<u{encoding.bits // 8}")
    sign = 1 << (encoding.bits - 1)
    if unsigned.view(f"<i{encoding.bits // 8}").max() < encoding.mask and unsigned.max() < sign | encoding.mask:
        return 0
    mask = unsigned.dtype.type(encoding.mask)
    nonfinite = (unsigned & mask) == mask
    if encoding.parts > 1:
        nonfinite = nonfinite.reshape(-1, encoding.parts).any(axis=1)
    return int(np.count_nonzero(nonfinite))


class NonFinite:
    """Counts of non-finite elements by tensor."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Number of elements by FQN; tensors without any are absent."""

    def look(self, item: PackItem, data: memoryview) -> None:
        """Count in some whole elements of a piece."""
        self._add(item, nonfinite_count(item.tensor.dtype, data))

    def look_together(self, items: Sequence[PackItem], data: memoryview) -> None:
        """Count in the complete bytes of consecutive pieces; pieces of one element type take one check together."""
        for dtype, run in groupby(items, lambda item: item.tensor.dtype):
            alike = list(run)
            start = alike[0].data_offset - items[0].data_offset
            stop = alike[-1].data_offset + alike[-1].bytes - items[0].data_offset
            if not nonfinite_count(dtype, data[start:stop]):
                continue
            for item in alike:
                at = item.data_offset - items[0].data_offset
                self._add(item, nonfinite_count(dtype, data[at : at + item.bytes]))

    def _add(self, item: PackItem, count: int) -> None:
        if count:
            self.counts[item.tensor.fqn] = self.counts.get(item.tensor.fqn, 0) + count
