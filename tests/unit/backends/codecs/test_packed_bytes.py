"""Packed planes of even bytes come back, and are the same whether bits are moved one byte or eight bytes at once."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.backends.codecs.packed_bytes import evens_of, packed_evens


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 512, 520, 1000, 1 << 16])
def test_planes_come_back(count: int) -> None:
    plane = np.random.default_rng(count).integers(0, 128, count, dtype=np.uint8) * np.uint8(2)
    packed = packed_evens(plane)
    run_bytes = -(-count // 8)
    assert len(packed) == 7 * run_bytes
    runs = np.append(plane, np.zeros(8 * run_bytes - count, np.uint8)).reshape(8, run_bytes)
    for number, row in enumerate(packed.reshape(7, run_bytes)):
        assert np.array_equal(row, runs[number] | (runs[7] >> (number + 1) & 1))
    assert np.array_equal(evens_of(packed.data, count, "plane"), plane)
