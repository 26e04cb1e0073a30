"""Whole numbers packed in columns, each in the narrowest width that holds its largest."""

from __future__ import annotations

import sys
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.errors import CorruptError

Ints = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
assert sys.byteorder == "little", "columns are stored little-endian and read without a swap"


def encode_column(numbers: ArrayLike) -> tuple[int, bytes]:
    """Return a column as its width in bytes and its little-endian bytes.

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
        CorruptError: The width is none of ours, the length does not fit, or a number exceeds 2**63 - 1.
    """
    width, data = column
    if width not in (1, 2, 4, 8) or len(data) % width or (count is not None and len(data) != count * width):
        raise CorruptError(f"{where}: a column of {len(data)} bytes, width {width}; expected {count} numbers")
    numbers = np.frombuffer(data, dtype=f"<u{width}")
    if width == 8 and numbers.size and int(numbers.max()) > np.iinfo(np.int64).max:
        raise CorruptError(f"{where}: a number of {int(numbers.max())}; expected at most 2**63 - 1")
    return numbers.astype(np.int64)


def run_starts(counts: Ints) -> Ints:
    """Return where each of several runs begins that lie one after the other, and where the last one ends."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def positions(first: Ints, numbers: Ints) -> Ints:
    """Return every position of the runs chosen, run after run.

    Args:
        first: Where each run begins, and where the last one ends.
        numbers: Which runs, in any order.
    """
    begin = first[numbers]
    counts = first[numbers + 1] - begin
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    found: Ints = np.repeat(begin - (ends - counts), counts)
    found += np.arange(total)  # In place: there may be tens of millions.
    return found


def products(counts: Ints, factors: NDArray[Number]) -> NDArray[Number]:
    """Return the product of each of several runs that lie one after the other; 1 of an empty one.

    Args:
        counts: Factors of each run.
        factors: Those of all runs.
    """
    first = run_starts(counts)
    found = np.ones(len(counts), dtype=factors.dtype)
    for place in range(int(counts.max()) if len(counts) else 0):
        longer = np.flatnonzero(counts > place)
        found[longer] *= factors[first[longer] + place]
    return found
