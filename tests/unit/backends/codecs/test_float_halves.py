"""Halves of elements at any address, and the numbers that bfloat16 cannot undo."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.backends.codecs.float_halves import LowHalves, fill_lower_halves, fill_upper_halves, round_to_bfloat16

EDGES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves at which rounding changes its mind."""


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_halves_are_shifts(itemsize: int, count: int, start: int) -> None:
    memory = np.random.default_rng(count).integers(0, 256, start + itemsize * count, dtype=np.uint8)
    elements = np.frombuffer(memory.data, f"u{itemsize}", count, start)
    upper, lower = np.zeros(count, np.uint16), np.zeros(count, np.uint16)
    fill_upper_halves(elements, upper)
    fill_lower_halves(elements, lower)
    assert np.array_equal(upper, elements >> (8 * itemsize - 16))
    assert np.array_equal(lower, elements & 0xFFFF)


@pytest.mark.parametrize("start", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("address", [0, 1])
def test_low_halves_are_written_from_any_byte_to_any_byte(start: int, count: int, address: int) -> None:
    elements = np.random.default_rng(count).integers(0, 1 << 32, 5, dtype=np.uint32)
    halves = LowHalves(elements)
    whole = (elements & 0xFFFF).astype(np.uint16).tobytes()
    assert len(halves) == len(whole)
    around = bytearray(b"\xa5" * (address + count + 1))
    halves.write(start, memoryview(around)[address : address + count])
    assert around == b"\xa5" * address + whole[start : start + count] + b"\xa5"


def rounded(elements: NDArray[np.uint32]) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.intp]]:
    upper, lower, found = (np.empty(len(elements), dtype) for dtype in (np.uint16, np.uint16, np.bool_))
    places = round_to_bfloat16(elements, upper, lower, found)
    return upper, lower, places


def test_every_upper_half_at_every_edge() -> None:
    for edge in EDGES:
        elements = np.arange(1 << 16, dtype=np.uint32) << 16 | edge
        upper, lower, places = rounded(elements)
        exact = elements >> 16
        nan = np.isnan(elements.view(np.float32))
        up = (edge > 0x8000) | ((edge == 0x8000) & (exact & 1).astype(bool))
        assert np.array_equal(upper, np.where(nan, 0x7FC0, exact + up))
        assert (lower == edge).all()
        undone = upper - (lower > 0x8000)
        assert np.array_equal(places, np.flatnonzero(undone != exact))


def test_ordinary_numbers_state_nothing() -> None:
    elements = np.array([1.0, -2.5, 0.3, 1e-40, np.inf, -0.0], np.float32).view(np.uint32)
    assert not len(rounded(elements)[2])
    assert list(rounded(np.array([0x3F808000, 0x3F818000], np.uint32))[2]) == [1]
