"""Decides which rank writes which bytes: one writer for every byte, computed by every rank without communication.

The owner of a shard depends only on the tensor and its replica group. Balancing considers only tensors of the
*identical* replica group: the ranks of equal coordinates on all sibling meshes (`siblings.py`). Ranks on overlapping
meshes see different tensors, so they would disagree about any wider balance.

With `keeps_pairs` a weight of 16 bits and its float32 master (`pairs.py`) go to one owner in equal regions: so the
master can be stored as what the weight lacks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region, corners
from holdfast.base.geometry.tensor import Role, Shard
from holdfast.base.geometry.value_class import value_class
from holdfast.core.plan.pairs import pairs_of

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
    """What has one owner: a piece, or two pieces of one region, a weight and its master."""

    owned: tuple[Owned, ...]
    fqn: str
    bytes: int

    @property
    def region(self) -> Region:
        """The region of its pieces."""
        return self.owned[0].region


def owned_by(
    rank: int,
    shards: Sequence[Shard],
    holders: Mapping[str, Ranks],
    split_bytes_min: int,
    *,
    lowest_only: bool = False,
    keeps_pairs: bool = False,
) -> list[Owned]:
    """Return what `rank` writes of the shards that it holds.

    Shards that are replicated by their placements are divided among the replicas: their bytes are concatenated in FQN
    order and cut into equal parts. A plain parameter or optimizer tensor is written whole by one of its holders: the
    largest tensor first, each by the least loaded holder. A plain buffer is written whole by its lowest holder, and so
    is a weight whose master is a plain buffer.

    Args:
        rank: This rank.
        shards: Its shards.
        holders: For each plain tensor the ranks that hold it, ascending. For each DTensor on sibling meshes the ranks
            that hold the same pieces and write: of all siblings, or of one, which this rank may not be on.
        split_bytes_min: Smaller pieces are not divided.
        lowest_only: Whether every plain tensor is written by its lowest holder, as buffers are.
        keeps_pairs: Whether a weight and its master have one owner.
    """
    replicated: dict[Ranks, list[_Item]] = {}
    copies: dict[Ranks, list[_Item]] = {}
    lowest: dict[Ranks, list[_Item]] = {}
    for number, shard in enumerate(shards):
        for region in shard.pieces:
            item = _Item((Owned(number, region),), shard.tensor.fqn, region.numel * shard.tensor.itemsize)
            if shard.holders is not None:
                replicated.setdefault(holders.get(shard.tensor.fqn, shard.holders), []).append(item)
            elif lowest_only or shard.role is Role.BUFFER:
                lowest.setdefault(holders[shard.tensor.fqn], []).append(item)
            else:
                copies.setdefault(holders[shard.tensor.fqn], []).append(item)
    owned: list[Owned] = []
    for group, items in replicated.items():
        if rank in group:
            alike = _joined(shards, items) if keeps_pairs else items
            owned += _equal_part(alike, group.index(rank), len(group), split_bytes_min)
    for group in {**copies, **lowest}:
        shared, kept, load = copies.get(group, []), lowest.get(group, []), 0
        if keeps_pairs:
            shared, kept, load = _with_weights_of_buffers(shards, shared, kept)
        if shared:
            owned += _whole_to_least_loaded(shared, group.index(rank), len(group), load)
        if group[0] == rank:
            owned += _parts_of(kept)
    return sorted(owned, key=lambda part: part.shard_number)


def _joined(shards: Sequence[Shard], items: Sequence[_Item]) -> list[_Item]:
    """Return the items of one replica group with each weight and its master as one."""
    by_piece = {(item.fqn, item.region): item for item in items}
    pairs = pairs_of((shards[item.owned[0].shard_number].tensor, item.region) for item in items)
    for (master, region), weight in pairs.items():
        first, second = by_piece[weight, region], by_piece.pop((master, region))
        by_piece[weight, region] = _Item(first.owned + second.owned, weight, first.bytes + second.bytes)
    return list(by_piece.values())


def _with_weights_of_buffers(
    shards: Sequence[Shard], shared: Sequence[_Item], kept: Sequence[_Item]
) -> tuple[list[_Item], list[_Item], int]:
    """Move plain tensors whose partner is a plain buffer to the lowest holder, which writes that buffer.

    Returns:
        What the holders share, what the lowest writes in any case, and how much of that counts as load: the pairs.
    """
    buffers = {item.owned[0].shard_number for item in kept}
    to_share, to_keep, load = [], [], 0
    for item in _joined(shards, [*shared, *kept]):
        if not any(part.shard_number in buffers for part in item.owned):
            to_share.append(item)
            continue
        to_keep.append(item)
        load += item.bytes if len(item.owned) > 1 else 0
    return to_share, to_keep, load


def _parts_of(items: Sequence[_Item]) -> list[Owned]:
    return [part for item in items for part in item.owned]


def _equal_part(items: list[_Item], member: int, members: int, split_bytes_min: int) -> list[Owned]:
    """Return a member's part of the concatenated items, cut into equal parts at row boundaries."""
    if members == 1:
        return _parts_of(items)
    items = sorted(items, key=lambda item: (item.fqn, corners(item.region)[0]))
    total = sum(item.bytes for item in items)
    first_cut, last_cut = total * member // members, total * (member + 1) // members
    owned: list[Owned] = []
    line = 0  # Bytes of the items before this one.
    for item in items:
        if item.bytes == 0:
            if member == 0:
                owned += item.owned
            continue
        rows, dim = _rows(item, split_bytes_min)
        first = _row_at(first_cut - line, item.bytes, rows)
        last = _row_at(last_cut - line, item.bytes, rows)
        if first < last:
            region = _rows_of(item.region, dim, first, last, rows)
            owned += [Owned(part.shard_number, region) for part in item.owned]
        line += item.bytes
    return owned


def _rows(item: _Item, split_bytes_min: int) -> tuple[int, int]:
    """Return the number of rows at which an item may be cut, and their dimension; one row: it is not cut.

    Rows follow the first dimension longer than one, so each part is contiguous in the piece's memory. A flat range
    may be cut at any element.
    """
    if item.bytes >= split_bytes_min:
        region = item.region
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


def _whole_to_least_loaded(items: list[_Item], member: int, members: int, first_load: int) -> list[Owned]:
    """Return a member's items: largest first, each goes to the least loaded member.

    Args:
        items: What is shared out.
        member, members: Number of this member, and count of all.
        first_load: Bytes that the first member writes anyhow.
    Source: longest processing time first (LPT) scheduling.
    """
    if members == 1:
        return _parts_of(items)
    loads = [(0, number) for number in range(1, members)]
    heapq.heappush(loads, (first_load, 0))
    owned: list[Owned] = []
    for item in sorted(items, key=lambda item: (-item.bytes, item.fqn)):
        load, least = heapq.heappop(loads)
        heapq.heappush(loads, (load + item.bytes, least))
        if least == member:
            owned += item.owned
    return owned
