"""Divides one piece of work so that unequal loads become as equal as possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def water_fill(loads: Ints, amount: int, share_min: int) -> Ints:
    """Return each rank's share of `amount`: the least loaded ranks are filled first. Shares add up to `amount`.

    Args:
        loads: Present load by rank.
        amount: Work to divide.
        share_min: Smallest useful share. If the amount is small, fewer ranks take part.
    """
    order = np.argsort(loads, kind="stable")
    takers = min(len(loads), max(amount // max(share_min, 1), 1))
    ascending = loads[order[:takers]]
    # With the k least loaded ranks the common level is (amount + their loads) / k. It must not be below any of their
    # loads, so take the largest k for which it is not.
    sums = np.cumsum(ascending)
    counts = np.arange(1, takers + 1)
    fits = ascending * counts - sums <= amount
    takers = int(np.flatnonzero(fits)[-1]) + 1
    level, rest = divmod(amount + int(sums[takers - 1]), takers)
    shares = np.zeros(len(loads), dtype=np.int64)
    shares[order[:takers]] = level - ascending[:takers] + (np.arange(takers) < rest)
    return shares
