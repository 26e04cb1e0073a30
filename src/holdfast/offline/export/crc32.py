"""Combines the CRC-32s of consecutive runs into the CRC-32 of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from holdfast.base.types.export import ExportFile
from holdfast.errors import CorruptError

_POLYNOMIAL = 0xEDB88320
"""The polynomial of zip and gzip, bits reversed."""


def checksums_of(file: ExportFile, sums: Iterable[tuple[int, int, int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the four bytes of every checksum in a file.

    Args:
        file: The file.
        sums: Number of a checksum, start and stop in the file, and the CRC-32 of that range, as `DoneWindow`.
    Raises:
        CorruptError: The sums leave a byte of a checksum's range out.
    """
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for number, start, stop, crc in sums:
        parts.setdefault(number, []).append((start, stop, crc))
    for number, checksum in enumerate(file.checksums):
        crc = joined_crc32(parts.get(number, ()), checksum.start, checksum.stop)
        yield from ((at, crc.to_bytes(4, "little")) for at in checksum.at)


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

    Source: zlib's `crc32_combine` by Mark Adler: a CRC is a polynomial over GF(2), and n zero bits multiply it by x**n.
    """
    power = 3  # A zero byte is 2**3 bits.
    while zeros:
        if zeros & 1:
            crc = _product(_power_of_x(power), crc)
        zeros >>= 1
        power += 1
    return crc


@cache
def _power_of_x(power: int) -> int:
    """Return x**(2**power), modulo the polynomial of the CRC. The highest bit is the coefficient of x**0."""
    return 1 << 30 if not power else _product(_power_of_x(power - 1), _power_of_x(power - 1))


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo the polynomial of the CRC."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
