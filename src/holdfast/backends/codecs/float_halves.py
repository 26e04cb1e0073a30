"""Upper and lower halves of float32 numbers, and how bfloat16 rounds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.dtype import BFLOAT16_NAN

_HALF_BYTES = 2

_HALF_A_STEP = 0x8000
"""Lower bits of a number exactly between two neighbours of bfloat16."""


class LowHalves:
    """The two lower bytes of each element, as they are stored: a `DirectPart`."""

    def __init__(self, elements: NDArray[np.uint32]) -> None:
        self._elements = elements

    def __len__(self) -> int:
        return _HALF_BYTES * len(self._elements)

    def write(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on."""
        at = min(start % _HALF_BYTES, len(target))
        first, count = (start + at) // _HALF_BYTES, (len(target) - at) // _HALF_BYTES
        if at:
            target[0] = int(self._elements[first - 1]) >> 8 & 0xFF
        fill_lower_halves(self._elements[first : first + count], np.frombuffer(target, np.uint16, count, at))
        if at + _HALF_BYTES * count < len(target):
            target[-1] = int(self._elements[first + count]) & 0xFF


def fill_upper_halves(elements: NDArray[np.unsignedinteger], upper: NDArray[np.uint16]) -> None:
    """Fill `upper` with the two upper bytes of each element.

    Args:
        elements: One or more of 4 or 8 bytes, contiguous.
        upper: As many.
    """
    itemsize, last = elements.itemsize, len(elements) - 1
    # In elements that begin at the upper bytes, these are the lower ones, and a cast keeps the lower ones alone: half
    # the time of a shift. The last element would go beyond the memory.
    shifted = np.frombuffer(elements.data, elements.dtype, last, itemsize - 2)
    np.copyto(upper[:last], shifted, casting="unsafe")
    upper[last] = elements[last] >> (8 * itemsize - 16)


def fill_lower_halves(elements: NDArray[np.unsignedinteger], lower: NDArray[np.uint16]) -> None:
    """Fill `lower` with the two lower bytes of each element."""
    np.copyto(lower, elements, casting="unsafe")


def round_to_bfloat16(
    elements: NDArray[np.uint32], upper: NDArray[np.uint16], lower: NDArray[np.uint16], found: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Fill `upper` with float32 numbers rounded to bfloat16, ties to even, and `lower` with their lower halves.

    Args:
        elements: The bits of the numbers, at least one.
        upper, lower, found: As many; the content of `found` is undefined afterwards.
    Returns:
        The places, ascending, where the upper half of a number is neither the rounded number, nor one less if its lower
        half is above half a step: some numbers exactly between two others, and some NaNs.
    """
    fill_lower_halves(elements, lower)
    fill_upper_halves(elements, upper)
    # Half a step is rounded up here. Such numbers are one in 65,536, and set right one by one.
    np.greater_equal(lower, _HALF_A_STEP, out=found)
    np.add(upper, found, out=upper)
    np.isnan(elements.view(np.float32), out=found)
    if found.any():
        np.logical_or(found, lower == _HALF_A_STEP, out=found)
    else:
        np.equal(lower, _HALF_A_STEP, out=found)
    places = np.flatnonzero(found)
    if not len(places):
        return places
    some = elements[places]
    exact, beyond = some >> 16, some & 0xFFFF
    rounded = exact + (beyond > _HALF_A_STEP) + ((beyond == _HALF_A_STEP) & (exact & 1).astype(np.bool_))
    rounded[np.isnan(some.view(np.float32))] = BFLOAT16_NAN
    upper[places] = rounded
    is_stated: NDArray[np.bool_] = rounded - (beyond > _HALF_A_STEP) != exact
    return places[is_stated]
