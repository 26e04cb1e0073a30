"""Shares of one piece of work that bring unequal loads as close to level as they can come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def water_fill(loads: Ints, amount: int, share_min: int) -> Ints:
    """Return how much of `amount` falls to each, the least loaded first, all of it in total.

    Args:
        loads: What each has already.
        amount: What is to be shared out.
        share_min: Nobody is given less than about this much, so that shares stay worth having: fewer take part then.
    """
    order = np.argsort(loads, kind="stable")
    taking = min(len(loads), max(amount // max(share_min, 1), 1))
    ascending = loads[order[:taking]]
    # With the k least loaded taking part the level is (amount + their loads) / k; it must not lie below any of theirs.
    sums = np.cumsum(ascending)
    counts = np.arange(1, taking + 1)
    fits = ascending * counts - sums <= amount
    taking = int(np.flatnonzero(fits)[-1]) + 1
    height, rest = divmod(amount + int(sums[taking - 1]), taking)
    shares = np.zeros(len(loads), dtype=np.int64)
    shares[order[:taking]] = height - ascending[:taking] + (np.arange(taking) < rest)
    return shares
