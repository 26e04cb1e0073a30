"""One writer for every byte, found by every rank alone.

The owner of a shard depends on the tensor and its replica group only. Balance looks at the other tensors of
the *identical* replica group and never beyond: ranks on overlapping meshes see different tensors and would
disagree about anything wider.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import field

from holdfast.geometry.box import Box
from holdfast.geometry.region import FlatRange, Region
from holdfast.geometry.tensor import Role, Shard
from holdfast.geometry.value_class import value_class

Ranks = tuple[int, ...]


@value_class
class Owned:
    """A region that this rank writes."""

    shard_number: int
    """Which of the rank's shards it is cut from."""

    region: Region
    """What is written."""


@value_class
class _Item:
    number: int
    region: Region
    itemsize: int
    fqn: str
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        # Asked for several times an item, to sort and to weigh.
        object.__setattr__(self, "bytes", self.region.numel * self.itemsize)


def owned_by(
    rank: int, shards: Sequence[Shard], plain_holders: Mapping[str, Ranks], split_bytes_min: int
) -> list[Owned]:
    """Return what `rank` writes of the shards it holds.

    Replicas stated by placements share out their bytes: laid end to end in FQN order, cut into equal parts.
    Agreed copies of plain parameters and optimizer tensors go whole to one holder each, heaviest first to the
    least loaded. Other plain tensors go whole to the lowest rank that holds them.

    Args:
        rank: The rank that asks.
        shards: What it holds.
        plain_holders: For each plain tensor the ranks that hold it, ascending.
        split_bytes_min: Pieces smaller than this are not cut.
    """
    shared: dict[Ranks, list[_Item]] = {}
    copies: dict[Ranks, list[_Item]] = {}
    owned: list[Owned] = []
    for number, shard in enumerate(shards):
        for region in shard.pieces:
            item = _Item(number, region, shard.tensor.itemsize, shard.tensor.fqn)
            if shard.holders is not None:
                shared.setdefault(shard.holders, []).append(item)
            elif shard.role is Role.BUFFER:
                if plain_holders[shard.tensor.fqn][0] == rank:
                    owned.append(Owned(number, region))
            else:
                copies.setdefault(plain_holders[shard.tensor.fqn], []).append(item)
    for group, items in shared.items():
        owned += _shared_out(items, group.index(rank), len(group), split_bytes_min)
    for group, items in copies.items():
        owned += _whole_to_least_loaded(items, group.index(rank), len(group))
    return sorted(owned, key=lambda each: each.shard_number)


def _shared_out(items: list[_Item], member: int, members: int, split_bytes_min: int) -> list[Owned]:
    """Return a member's part of the items laid end to end and cut into equal parts at row boundaries."""
    if members == 1:
        return [Owned(item.number, item.region) for item in items]
    items = sorted(items, key=lambda item: (item.fqn, _order(item.region)))
    total = sum(item.bytes for item in items)
    first_cut, last_cut = total * member // members, total * (member + 1) // members
    owned = []
    line = 0
    for item in items:
        if item.bytes == 0:
            if member == 0:
                owned.append(Owned(item.number, item.region))
            continue
        rows, dim = _rows(item, split_bytes_min)
        first = _row_at(first_cut - line, item.bytes, rows)
        last = _row_at(last_cut - line, item.bytes, rows)
        if first < last:
            owned.append(Owned(item.number, _rows_of(item.region, dim, first, last, rows)))
        line += item.bytes
    return owned


def _rows(item: _Item, split_bytes_min: int) -> tuple[int, int]:
    """Return into how many rows an item may be cut and along which dimension; one row: not at all.

    Cutting the first dimension longer than one keeps each part a single run of the piece's memory; a flat range
    may be cut anywhere.
    """
    if item.bytes >= split_bytes_min:
        if isinstance(item.region, FlatRange):
            return item.region.numel, 0
        for dim, length in enumerate(item.region.shape):
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


def _order(region: Region) -> tuple[int, ...]:
    return (region.start,) if isinstance(region, FlatRange) else region.start


def _whole_to_least_loaded(items: list[_Item], member: int, members: int) -> list[Owned]:
    """Return the items that fall to a member: heaviest first, each to the least loaded (LPT)."""
    if members == 1:
        return [Owned(item.number, item.region) for item in items]
    loads = [(0, each) for each in range(members)]
    owned = []
    for item in sorted(items, key=lambda item: (-item.bytes, item.fqn)):
        load, least = heapq.heappop(loads)
        heapq.heappush(loads, (load + item.bytes, least))
        if least == member:
            owned.append(Owned(item.number, item.region))
    return owned
