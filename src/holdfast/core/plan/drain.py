"""Which rank copies which file of a step that is drained: every rank finds the same answer by itself."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def share_of(files: Iterable[tuple[str, int]], world_size: int, rank: int) -> frozenset[str]:
    """Return the keys that one rank copies: the largest file first, each to the rank with the fewest bytes so far.

    The shares of all ranks are all files, each once. A share exceeds an even one by less than the largest file.

    Args:
        files: Key and bytes of every file that the manifest of the step names, in any order.
        world_size: Number of ranks.
        rank: This rank.
    """
    loads = [(0, each) for each in range(world_size)]
    share = set()
    for key, file_bytes in sorted(files, key=lambda file: (-file[1], file[0])):
        load_bytes, taker = loads[0]
        heapq.heapreplace(loads, (load_bytes + file_bytes, taker))
        if taker == rank:
            share.add(key)
    return frozenset(share)
