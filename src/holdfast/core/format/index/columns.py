"""Columns of whole numbers, each stored in the narrowest width that holds its largest number."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.errors import CorruptError

Ints = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

_BLOCK = 1 << 17
"""Runs taken at once: many enough to amortise the calls, few enough that temporary arrays stay small."""

_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
assert sys.byteorder == "little", "columns are stored little-endian and read without a swap"


def encode_column(numbers: ArrayLike) -> tuple[int, bytes]:
    """Return a column as (width in bytes, little-endian bytes).

    Args:
        numbers: Whole numbers from 0 to 2**63 - 1; shape (count,).
    """
    column = np.asarray(numbers, dtype=np.int64)
    assert column.size == 0 or int(column.min()) >= 0, "columns hold no negative numbers"
    largest = int(column.max()) if column.size else 0
    dtype = next(width for width in _WIDTHS if largest <= np.iinfo(width).max)
    return np.dtype(dtype).itemsize, column.astype(dtype).tobytes()


def decode_column(column: tuple[int, bytes], where: str, count: int | None = None) -> Ints:
    """Return the numbers of a column, shape (count,).

    Raises:
        CorruptError: The width is not 1, 2, 4 or 8, the length does not fit, or a number exceeds 2**63 - 1.
    """
    width, data = column
    if width not in (1, 2, 4, 8) or len(data) % width or (count is not None and len(data) != count * width):
        raise CorruptError(
            f"{where}: a column of {len(data)} bytes, width {width}; expected {count} numbers. Read another copy"
        )
    numbers = np.frombuffer(data, dtype=f"<u{width}")
    if width == 8 and numbers.size and int(numbers.max()) > np.iinfo(np.int64).max:
        raise CorruptError(f"{where}: a number of {int(numbers.max())}; expected at most 2**63 - 1. Read another copy")
    return numbers.astype(np.int64)


def run_starts(counts: Ints) -> Ints:
    """Return the start of each of several consecutive runs, and the end of the last; shape (runs + 1,)."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def positions(first: Ints, numbers: Ints) -> Ints:
    """Return every position of the chosen runs, run after run.

    Args:
        first: The start of each run, and the end of the last, as `run_starts` returns.
        numbers: Numbers of the chosen runs, in any order.
    """
    begin = first[numbers]
    counts = first[numbers + 1] - begin
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    result: Ints = np.repeat(begin - (ends - counts), counts)
    result += np.arange(total)  # In place: there may be tens of millions.
    return result


def runs_taken(values: NDArray[Any], first: Ints, numbers: Ints) -> NDArray[Any]:
    """Return the values of the chosen runs, run after run; arguments as `positions`."""
    # Block by block: the positions of tens of millions of values would need as much memory as the values.
    blocks = [numbers[at : at + _BLOCK] for at in range(0, len(numbers), _BLOCK)]
    result = np.empty(int((first[numbers + 1] - first[numbers]).sum()), dtype=values.dtype)
    filled = 0
    for block in blocks:
        at = positions(first, block)
        result[filled : filled + len(at)] = values[at]
        filled += len(at)
    return result


def products(counts: Ints, factors: NDArray[Number]) -> NDArray[Number]:
    """Return the product of each of several consecutive runs of factors; 1 for an empty run.

    Args:
        counts: Number of factors of each run.
        factors: The factors of all runs, run after run.
    """
    result = np.ones(len(counts), dtype=factors.dtype)
    filled = np.flatnonzero(counts)
    # `reduceat` multiplies from each start to the next one. An empty run has no factors between the two.
    result[filled] = np.multiply.reduceat(factors, run_starts(counts)[filled])
    return result
