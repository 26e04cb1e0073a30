"""Ranks as ranges with a stride, so that a message to every rank does not grow with the size of the job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, starmap

RankRanges = Sequence[Sequence[int]]
"""Ascending ranks as ranges of `[first, stop, stride]`."""


def rank_ranges(ranks: Sequence[int]) -> RankRanges:
    """Return ranks as ranges: the ranks of one pipeline stage, or of one column of a mesh, are one range.

    Args:
        ranks: Ranks, ascending.
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges:
            first, stop, stride = ranges[-1]
            last = stop - 1
            if first == last:
                # A second rank always continues a range of one: it sets the stride.
                ranges[-1] = [first, rank + 1, rank - first]
                continue
            if rank == last + stride:
                ranges[-1][1] = rank + 1
                continue
        ranges.append([rank, rank + 1, 1])
    return ranges


def ranks_in(ranges: RankRanges) -> tuple[int, ...]:
    """Return the ranks of ranges that `rank_ranges` returned."""
    return tuple(chain.from_iterable(starmap(range, ranges)))
