"""Counts elements that are NaN or infinite in raw bytes, as they pass through the processor's cache.

A non-finite element has all bits of its exponent set; taken as a whole number with its sign, and without, such bits
are the largest there are. So the maxima of both tell, at the speed of memory and without a copy, that there is none;
only where there is one are elements counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from holdfast.types.plan import PackItem


@dataclass(frozen=True, slots=True)
class _Code:
    """How an element type writes what is not finite."""

    bits: int
    """Of one number; a complex element is two."""

    mask: int
    """Bits that tell, all set where it is not finite."""

    parts: int = 1
    """Numbers in an element."""


_CODES = {
    "float16": _Code(16, 0x7C00),
    "bfloat16": _Code(16, 0x7F80),
    "float32": _Code(32, 0x7F80_0000),
    "float64": _Code(64, 0x7FF0_0000_0000_0000),
    "complex32": _Code(16, 0x7C00, parts=2),
    "complex64": _Code(32, 0x7F80_0000, parts=2),
    "complex128": _Code(64, 0x7FF0_0000_0000_0000, parts=2),
    "float8_e5m2": _Code(8, 0x7C),
    # No infinity; all but the sign set is NaN.
    "float8_e4m3fn": _Code(8, 0x7F),
}
_NEGATIVE_ZERO_IS_NAN = ("float8_e4m3fnuz", "float8_e5m2fnuz")
"""Types without infinity whose one NaN is what negative zero would be."""


def nonfinite_count(dtype: str, data: bytes | memoryview) -> int:
    """Return how many elements are NaN or infinite; of a complex one either part.

    Args:
        dtype: Element type by name.
        data: Whole elements.
    """
    if dtype in _NEGATIVE_ZERO_IS_NAN:
        signed = np.frombuffer(data, np.int8)
        return int(np.count_nonzero(signed == -128)) if signed.size and signed.min() == -128 else 0
    code = _CODES.get(dtype)
    if code is None or not len(data):
        return 0
    unsigned = np.frombuffer(data, f"<u{code.bits // 8}")
    sign = 1 << (code.bits - 1)
    if unsigned.view(f"<i{code.bits // 8}").max() < code.mask and unsigned.max() < sign | code.mask:
        return 0
    mask = unsigned.dtype.type(code.mask)
    found = (unsigned & mask) == mask
    return int(np.count_nonzero(found.reshape(-1, code.parts).any(axis=1) if code.parts > 1 else found))


class NonFinite:
    """What was counted of the tensors that passed."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Elements by FQN, where there are any."""

    def look(self, item: PackItem, data: memoryview) -> None:
        """Count some whole elements of a piece."""
        self._add(item, nonfinite_count(item.tensor.dtype, data))

    def look_together(self, items: Sequence[PackItem], data: memoryview) -> None:
        """Count neighbouring pieces of which all bytes are there: those of one element type in one go."""
        for dtype, run in groupby(items, lambda item: item.tensor.dtype):
            own = list(run)
            start = own[0].data_offset - items[0].data_offset
            stop = own[-1].data_offset + own[-1].bytes - items[0].data_offset
            if not nonfinite_count(dtype, data[start:stop]):
                continue
            for item in own:
                at = item.data_offset - items[0].data_offset
                self._add(item, nonfinite_count(dtype, data[at : at + item.bytes]))

    def _add(self, item: PackItem, count: int) -> None:
        if count:
            self.counts[item.tensor.fqn] = self.counts.get(item.tensor.fqn, 0) + count
