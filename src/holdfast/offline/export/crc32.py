"""Combines the CRC-32s of consecutive runs into the CRC-32 of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from holdfast.errors import CorruptError

_POLYNOMIAL = 0xEDB88320
"""The polynomial of zip and gzip, bits reversed."""

_Matrix = tuple[int, ...]
"""32 columns over GF(2)."""


def joined_crc32(parts: Iterable[tuple[int, int, int]], start: int, stop: int) -> int:
    """Return the CRC-32 of bytes `[start, stop)`.

    Args:
        parts: Start, stop and CRC-32 of each run, in any order; the runs cover the whole, each byte once.
        start, stop: Byte range of the whole.
    Raises:
        CorruptError: The runs leave a byte out, or overlap.
    """
    crc, at = 0, start
    for first, end, part_crc in sorted(parts):
        if first != at or end > stop:
            raise CorruptError(f"checksums are known up to byte {at} of {stop} and from {first} on; expected no gap")
        crc, at = _append_zeros(crc, end - first) ^ part_crc, end
    if at != stop:
        raise CorruptError(f"checksums are known up to byte {at} of {stop}; expected all")
    return crc


def _append_zeros(crc: int, zeros: int) -> int:
    """Return the CRC-32 of data followed by that many zero bytes, from the CRC-32 of the data.

    Source: zlib's `crc32_combine`, as first written by Mark Adler: each zero bit is a linear step over GF(2).
    """
    power = 3  # A zero byte is 2**3 bit steps.
    while zeros:
        if zeros & 1:
            crc = _times(_steps(power), crc)
        zeros >>= 1
        power += 1
    return crc


@cache
def _steps(power: int) -> _Matrix:
    """Return 2**power steps as one matrix."""
    if not power:
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _steps(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(matrix: _Matrix, vector: int) -> int:
    product = 0
    for column in matrix:
        if vector & 1:
            product ^= column
        vector >>= 1
    return product
