"""CRC-32s of runs, joined into that of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from holdfast.errors import CorruptError

_POLYNOMIAL = 0xEDB88320
"""That of zip and gzip, its bits reversed."""

_Matrix = tuple[int, ...]
"""32 columns over GF(2)."""


def joined_crc32(parts: Iterable[tuple[int, int, int]], start: int, stop: int) -> int:
    """Return the CRC-32 of bytes `[start, stop)`.

    Args:
        parts: First byte, byte past the last and CRC-32 of each run, in any order; together the whole, each byte once.
        start, stop: The whole.
    Raises:
        CorruptError: They leave a byte out, or have one twice.
    """
    crc, at = 0, start
    for first, end, each in sorted(parts):
        if first != at or end > stop:
            raise CorruptError(f"checksums are known up to byte {at} of {stop} and from {first} on; expected no gap")
        crc, at = _shifted(crc, end - first) ^ each, end
    if at != stop:
        raise CorruptError(f"checksums are known up to byte {at} of {stop}; expected all")
    return crc


def _shifted(crc: int, zeros: int) -> int:
    """Return what a CRC-32 becomes by that many zero bytes after what it is of.

    Source: zlib's `crc32_combine`, as first written by Mark Adler: each zero bit is a linear step over GF(2).
    """
    power = 3  # A byte is eight steps.
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
    found = 0
    for column in matrix:
        if vector & 1:
            found ^= column
        vector >>= 1
    return found
