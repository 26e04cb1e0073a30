"""Decides which rank writes which bytes: one writer for every byte, computed by every rank without communication.

The owner of a shard depends only on the tensor and its replica group. Balancing considers only tensors of the
*identical* replica group: the ranks of equal coordinates on all sibling meshes (`siblings.py`). Ranks on overlapping
meshes see different tensors, so they would disagree about any wider balance.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from holdfast.geometry.box import Box
from holdfast.geometry.region import FlatRange, Region, corners
from holdfast.geometry.tensor import Role, Shard
from holdfast.geometry.value_class import value_class

Ranks = tuple[int, ...]


@value_class
class Owned:
    """A region that this rank writes."""

    shard_number: int
    """Number of the rank's shard that it is part of."""

    region: Region
    """The region to write."""


@value_class
class _Item:
    owned: Owned
    fqn: str
    bytes: int


def owned_by(
    rank: int,
    shards: Sequence[Shard],
    holders: Mapping[str, Ranks],
    split_bytes_min: int,
    *,
    lowest_only: bool = False,
) -> list[Owned]:
    """Return what `rank` writes of the shards that it holds.

    Shards that are replicated by their placements are divided among the replicas: their bytes are concatenated in FQN
    order and cut into equal parts. A plain parameter or optimizer tensor is written whole by one of its holders: the
    largest tensor first, each by the least loaded holder. A plain buffer is written whole by its lowest holder.

    Args:
        rank: This rank.
        shards: Its shards.
        holders: For each plain tensor the ranks that hold it, ascending. For each DTensor on sibling meshes the ranks
            that hold the same pieces and write: of all siblings, or of one, which this rank may not be on.
        split_bytes_min: Smaller pieces are not divided.
        lowest_only: Whether every plain tensor is written by its lowest holder, as buffers are.
    """
    replicated: dict[Ranks, list[_Item]] = {}
    copies: dict[Ranks, list[_Item]] = {}
    owned: list[Owned] = []
    for number, shard in enumerate(shards):
        for region in shard.pieces:
            item = _Item(Owned(number, region), shard.tensor.fqn, region.numel * shard.tensor.itemsize)
            if shard.holders is not None:
                replicated.setdefault(holders.get(shard.tensor.fqn, shard.holders), []).append(item)
            elif lowest_only or shard.role is Role.BUFFER:
                if holders[shard.tensor.fqn][0] == rank:
                    owned.append(item.owned)
            else:
                copies.setdefault(holders[shard.tensor.fqn], []).append(item)
    for group, items in replicated.items():
        if rank not in group:
            continue
        owned += _equal_part(items, group.index(rank), len(group), split_bytes_min)
    for group, items in copies.items():
        owned += _whole_to_least_loaded(items, group.index(rank), len(group))
    return sorted(owned, key=lambda part: part.shard_number)


def _equal_part(items: list[_Item], member: int, members: int, split_bytes_min: int) -> list[Owned]:
    """Return a member's part of the concatenated items, cut into equal parts at row boundaries."""
    if members == 1:
        return [item.owned for item in items]
    items = sorted(items, key=lambda item: (item.fqn, corners(item.owned.region)[0]))
    total = sum(item.bytes for item in items)
    first_cut, last_cut = total * member // members, total * (member + 1) // members
    owned = []
    line = 0  # Bytes of the items before this one.
    for item in items:
        if item.bytes == 0:
            if member == 0:
                owned.append(item.owned)
            continue
        rows, dim = _rows(item, split_bytes_min)
        first = _row_at(first_cut - line, item.bytes, rows)
        last = _row_at(last_cut - line, item.bytes, rows)
        if first < last:
            region = _rows_of(item.owned.region, dim, first, last, rows)
            owned.append(Owned(item.owned.shard_number, region))
        line += item.bytes
    return owned


def _rows(item: _Item, split_bytes_min: int) -> tuple[int, int]:
    """Return the number of rows at which an item may be cut, and their dimension; one row: it is not cut.

    Rows follow the first dimension longer than one, so each part is contiguous in the piece's memory. A flat range
    may be cut at any element.
    """
    if item.bytes >= split_bytes_min:
        region = item.owned.region
        if isinstance(region, FlatRange):
            return region.numel, 0
        for dim, length in enumerate(region.shape):
            if length > 1:
                return length, dim
    return 1, 0


def _row_at(cut: int, item_bytes: int, rows: int) -> int:
    """Return the row boundary nearest to a cut, halves up, clamped to the item."""
    return min(max((2 * cut * rows + item_bytes) // (2 * item_bytes), 0), rows)


def _rows_of(region: Region, dim: int, first: int, last: int, rows: int) -> Region:
    if (first, last) == (0, rows):
        return region
    if isinstance(region, FlatRange):
        return FlatRange(region.start + first, region.start + last)
    start, stop = list(region.start), list(region.stop)
    start[dim], stop[dim] = region.start[dim] + first, region.start[dim] + last
    return Box(tuple(start), tuple(stop))


def _whole_to_least_loaded(items: list[_Item], member: int, members: int) -> list[Owned]:
    """Return a member's items: largest first, each goes to the least loaded member.

    Source: longest processing time first (LPT) scheduling.
    """
    if members == 1:
        return [item.owned for item in items]
    loads = [(0, number) for number in range(members)]
    owned = []
    for item in sorted(items, key=lambda item: (-item.bytes, item.fqn)):
        load, least = heapq.heappop(loads)
        heapq.heappush(loads, (load + item.bytes, least))
        if least == member:
            owned.append(item.owned)
    return owned
