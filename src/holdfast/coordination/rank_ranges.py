"""Many ranks in few numbers: what every rank of a large job must be told must not grow with the job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def rank_ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs of `[first, stop, stride]`.

    The members of a pipeline stage, or of a column of a mesh, are one run.

    Args:
        ranks: Ranks, ascending.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs:
            first, stop, stride = runs[-1]
            last = stop - 1
            if first == last:
                # Any second rank continues a run of one.
                runs[-1] = [first, rank + 1, rank - first]
                continue
            if rank == last + stride:
                runs[-1][1] = rank + 1
                continue
        runs.append([rank, rank + 1, 1])
    return runs


def ranks_in(runs: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that `rank_ranges` wrote down."""
    return tuple(rank for first, stop, stride in runs for rank in range(first, stop, stride))
