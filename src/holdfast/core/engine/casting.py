"""Widens elements of a type to numbers that numpy computes with, and casts them to another type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.base.geometry.dtype import BFLOAT16_NAN, DTYPES, PAIRS
from holdfast.errors import InvalidError

CAST_TO = ("float16", "bfloat16", "float32", "float64")
"""Types to which floating elements can be cast."""

_BLOCK = 32 << 10
"""Elements cast at once."""


def widened(stored: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Return elements as numbers that numpy computes with, without rounding.

    Args:
        stored: Elements as stored, of the numpy dtype in `DTYPES`.
        dtype: Their true type.
    Returns:
        float32 for narrower floating types, complex64 for complex32; other types unchanged.
    """
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return stored.astype(np.float32)
    if dtype == "complex32":
        halves = np.ascontiguousarray(stored).reshape(-1).view(np.float16)
        return halves.astype(np.float32).view(np.complex64).reshape(stored.shape)
    if dtype in _FLOAT8:
        return _FLOAT8[dtype][stored.astype(np.intp)]
    return stored


def can_cast(source: str, target: str) -> bool:
    """Return whether `cast` supports these two types."""
    floating = DTYPES[source].floating and not source.startswith("complex") and source != PAIRS
    return source == target or (floating and target in CAST_TO)


def cast(stored: NDArray[np.generic], source: str, target: str) -> NDArray[np.generic]:
    """Return floating elements as another floating type, rounded to nearest, ties to even.

    Numbers that are too large become infinite; a NaN stays a NaN. float64 is cast to a 16-bit type via float32, as in
    torch, so it is rounded twice.

    Args:
        stored: Elements as stored, of the numpy dtype in `DTYPES`.
        source: Their true type.
        target: One of `CAST_TO`.
    Returns:
        Elements as stored, of the numpy dtype in `DTYPES` for `target`.
    Raises:
        InvalidError: The source is not a real floating type, or the target is not in `CAST_TO`.
    """
    if source == target:
        return stored
    if not can_cast(source, target):
        raise InvalidError(
            f"cannot cast {source} to {target}; expected a floating type, to one of {', '.join(CAST_TO)}"
        )
    numbers = widened(stored, source)
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "float64":
            return numbers.astype(np.float64)
        single = numbers.astype(np.float32, copy=False)
        if target == "float32":
            return single
        return single.astype(np.float16) if target == "float16" else _bfloat16(single)


def common_type(a: str, b: str) -> str | None:
    """Return the numpy type that represents every element of two types exactly; None if numpy has none.

    Args:
        a, b: Element types by name.
    """
    if PAIRS in (a, b):
        return None
    types = [widened(np.zeros(0, DTYPES[dtype].numpy), dtype).dtype for dtype in (a, b)]
    if all(number.kind in "biu" for number in types):
        both = np.promote_types(*types)
        return both.name if both.kind in "biu" else None
    if any(number.kind in "iu" and number.itemsize > 4 for number in types):
        return None
    return "complex128" if any(number.kind == "c" for number in types) else "float64"


def _bfloat16(single: NDArray[np.generic]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 elements, rounded to nearest even.

    Source: adding 0x7FFF plus the lowest kept bit carries into the upper half exactly if the number rounds up.
    """
    numbers = single.view(np.float32).reshape(-1)
    upper = np.empty(len(numbers), np.uint16)
    # In blocks that stay in the processor's cache: two thirds of the time, since fresh memory costs page faults.
    sums = np.empty(min(len(numbers), _BLOCK), np.uint32)
    for start in range(0, len(numbers), _BLOCK):
        some = numbers[start : start + _BLOCK]
        bits, halves, rounded = some.view(np.uint32), upper[start : start + _BLOCK], sums[: len(some)]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=halves, casting="unsafe")
        # The carry can turn a NaN into an infinity or a negative zero, so NaNs are set by hand.
        nan = np.isnan(some)
        if nan.any():
            halves[nan] = BFLOAT16_NAN
    return upper.reshape(single.shape)


def _float8_table(
    exponent_bits: int, bias: int, *, like_ieee: bool = False, one_zero: bool = False
) -> NDArray[np.float32]:
    """Return the number that each of the 256 bytes encodes.

    Args:
        exponent_bits: Bits of the exponent; the sign has one bit, the fraction the rest.
        bias: Subtracted from the exponent.
        like_ieee: Whether the largest exponent encodes infinities and NaNs; otherwise only 0x7F and 0xFF are NaNs.
        one_zero: Whether the byte of negative zero is the only NaN.
    Source: OCP 8-bit Floating Point Specification 1.0, and arXiv:2206.02915 for the `fnuz` types.
    """
    fraction_bits = 7 - exponent_bits
    byte = np.arange(256)
    exponent = (byte & 0x7F) >> fraction_bits
    fraction = (byte & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    table = np.where(exponent > 0, 1 + fraction, fraction) * np.exp2(np.maximum(exponent, 1) - bias)
    if like_ieee:
        largest = exponent == (1 << exponent_bits) - 1
        table[largest] = np.where(fraction[largest] > 0, np.nan, np.inf)
    elif not one_zero:
        table[0x7F] = table[0xFF] = np.nan
    table[0x80:] *= -1
    if one_zero:
        table[0x80] = np.nan
    numbers: NDArray[np.float32] = table.astype(np.float32)
    return numbers


def _powers_of_two() -> NDArray[np.float32]:
    """Return the number that each byte of float8_e8m0fnu encodes: an exponent without sign; 0xFF is NaN."""
    powers = np.exp2(np.arange(256) - 127.0)
    powers[0xFF] = np.nan
    numbers: NDArray[np.float32] = powers.astype(np.float32)
    return numbers


_FLOAT8: dict[str, NDArray[np.float32]] = {
    "float8_e4m3fn": _float8_table(4, 7),
    "float8_e5m2": _float8_table(5, 15, like_ieee=True),
    "float8_e4m3fnuz": _float8_table(4, 8, one_zero=True),
    "float8_e5m2fnuz": _float8_table(5, 16, one_zero=True),
    "float8_e8m0fnu": _powers_of_two(),
}
