"""Elements of one type as numbers, and as elements of another type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import InvalidError
from holdfast.geometry.dtype import DTYPES

CAST_TO = ("float16", "bfloat16", "float32", "float64")
"""Types that floating elements are cast to."""

_BFLOAT16_NAN = 0x7FC0


def widened(stored: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Return elements as numbers that numpy reckons with, none of them rounded.

    Args:
        stored: Elements as they lie in a file, of the numpy dtype that `DTYPES` names.
        dtype: Their true type.
    Returns:
        float32 for floating types narrower than it, complex64 for complex32; anything else as it is.
    """
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return stored.astype(np.float32)
    if dtype == "complex32":
        return (
            np.ascontiguousarray(stored)
            .reshape(-1)
            .view(np.float16)
            .astype(np.float32)
            .view(np.complex64)
            .reshape(stored.shape)
        )
    if dtype in _FLOAT8:
        return _FLOAT8[dtype][stored.astype(np.intp)]
    return stored


def can_cast(source: str, target: str) -> bool:
    """Return whether `cast` takes elements of one type to another."""
    floating = DTYPES[source].floating and not source.startswith("complex")
    return source == target or (floating and target in CAST_TO)


def cast(stored: NDArray[np.generic], source: str, target: str) -> NDArray[np.generic]:
    """Return floating elements as another floating type, rounded to nearest, ties to even.

    What is too large becomes infinite, and any NaN a NaN. float64 becomes a 16-bit type by way of float32, as in torch.

    Args:
        stored: Elements as they lie in a file, of the numpy dtype that `DTYPES` names.
        source: Their true type.
        target: One of `CAST_TO`.
    Returns:
        Elements as they lie in a file, of the numpy dtype that `DTYPES` names for `target`.
    Raises:
        InvalidError: They are not floating, or complex, or the target is none of those.
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
    """Return the numpy type that holds every element of two types exactly; None where numpy has none.

    Args:
        a, b: Element types by name.
    """
    numbers = [_number_type(a), _number_type(b)]
    if all(each.kind in "biu" for each in numbers):
        both = np.promote_types(*numbers)
        return both.name if both.kind in "biu" else None
    if any(each.kind in "iu" and each.itemsize > 4 for each in numbers):
        return None
    return "complex128" if any(each.kind == "c" for each in numbers) else "float64"


def _number_type(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy type of what `widened` makes of elements."""
    return widened(np.zeros(0, DTYPES[dtype].numpy), dtype).dtype


def _bfloat16(single: NDArray[np.generic]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 elements, rounded to nearest even.

    Source: adding 0x7FFF and the lowest bit that is kept carries exactly where the number is to be rounded up.
    """
    bits = single.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    upper = rounded.astype(np.uint16)
    nan = np.isnan(single.view(np.float32))
    if nan.any():
        upper[nan] = _BFLOAT16_NAN
    return upper


def _float8_table(
    exponent_bits: int, bias: int, *, like_ieee: bool = False, one_zero: bool = False
) -> NDArray[np.float32]:
    """Return the number that each of 256 bytes stands for.

    Args:
        exponent_bits: Bits of the exponent; the sign has one, the fraction the rest.
        bias: What is taken from the exponent.
        like_ieee: Whether the largest exponent stands for infinity and NaN; else only the largest byte is a NaN.
        one_zero: Whether there is no negative zero, and its byte is the only NaN.
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
    found: NDArray[np.float32] = table.astype(np.float32)
    return found


_FLOAT8: dict[str, NDArray[np.float32]] = {
    "float8_e4m3fn": _float8_table(4, 7),
    "float8_e5m2": _float8_table(5, 15, like_ieee=True),
    "float8_e4m3fnuz": _float8_table(4, 8, one_zero=True),
    "float8_e5m2fnuz": _float8_table(5, 16, one_zero=True),
}
