"""Finds declared parts that overlap or leave gaps, from a few bytes of each rank.

Each rank sums a random polynomial over the parts that it declares, weighted by name and by its place among the
replicas. The sums of all ranks add up to that of the whole tensors only if every element has one group of replicas, and
each rank of the group declares the same parts. Anything else passes with a chance of about 2**-58.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.overlap import first_overlap
from holdfast.base.geometry.rank_ranges import RankRanges, ranks_in
from holdfast.base.geometry.region import region_boxes
from holdfast.base.geometry.tensor import Shard
from holdfast.base.geometry.value_class import value_class
from holdfast.core.format.digest import short_digest_of
from holdfast.core.plan.cover import PRIME, volumes
from holdfast.core.plan.siblings import NO_FAMILY
from holdfast.errors import first_three

Sum = tuple[int, int]
"""Residues modulo `PRIME`, of two random polynomials."""

NO_PARTS: Sum = 0, 0
"""The sum of nothing."""

_PAIR = struct.Struct("<II")

_LAYOUTS_MAX = 4
"""Layouts kept: a job may save several in turn."""


@value_class
class DeclaredTensor:
    """What all ranks that declare parts of a tensor must agree on."""

    dtype: str
    """Element type."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    is_located: bool = False
    """Whether the tensor carries its coordinates. Then ranks with equal parts are replicas, though none states it."""


@value_class
class DeclaredParts:
    """What one rank declares of a tensor."""

    boxes: tuple[Box, ...]
    """The boxes, flat ranges as boxes."""

    holders: tuple[int, ...]
    """Ranks that declare the same, ascending."""


@value_class
class RankSums:
    """What one rank states of all its declared tensors together."""

    held: Sum
    """The sum of the parts that it declares."""

    whole: Sum
    """The sum of the same tensors as a whole."""


@dataclass(frozen=True, slots=True)
class ReplicaDivisions:
    """The replicas of tensors that carry their coordinates."""

    divisions: Sequence[Sequence[RankRanges]] = ()
    """Divisions of the ranks into groups; the ranks of a group hold equal parts."""

    division_of: Mapping[str, int] = field(default_factory=dict)
    """By FQN: number of its division; 0 for all others."""

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The ranks of each group, all divisions one after the other."""
        return [ranks_in(group) for division in self.divisions for group in division]

    def families_of(self, rank: int, families: int) -> list[int]:
        """Return by division the number of the family that is the group of a rank, or `NO_FAMILY`.

        Args:
            rank: The rank.
            families: Count of all families, of which the groups are the last.
        """
        found, first = [], families - sum(map(len, self.divisions))
        for division in self.divisions:
            numbers = (first + number for number, group in enumerate(division) if rank in ranks_in(group))
            found.append(next(numbers, NO_FAMILY))
            first += len(division)
        return found


class SumCache:
    """The sums of the layouts that were saved last: to sum up a flat range takes 20 µs, at every save."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, RankSums] = OrderedDict()
        self.replicas: dict[object, ReplicaDivisions] = {}
        """On rank 0: the replicas that it last asked for, by the layout of all ranks."""

    def of(self, digest: bytes, shards: Iterable[Shard], rank: int) -> RankSums:
        """Return the sums of a rank's shards.

        Args:
            digest: Digest of the shards.
            shards: The shards.
            rank: The rank.
        """
        if digest not in self._known:
            shards = [shard for shard in shards if is_declared(shard)]
            held, whole = sums_of_parts(shards, rank), sums_of_wholes(declared_tensors(shards))
            self._known[digest] = RankSums(total(held.values()), total(whole.values()))
        self._known.move_to_end(digest)
        while len(self._known) > _LAYOUTS_MAX:
            self._known.popitem(last=False)
        return self._known[digest]


def is_declared(shard: Shard) -> bool:
    """Return whether ranks state their parts of a tensor; those of a DTensor follow from its mesh."""
    return shard.holders is not None and shard.layout is None


def declared_tensors(shards: Iterable[Shard]) -> dict[str, DeclaredTensor]:
    """Return the tensors of which a rank declares parts, by FQN."""
    return {
        shard.tensor.fqn: DeclaredTensor(shard.tensor.dtype, shard.tensor.global_shape, shard.is_located)
        for shard in shards
        if is_declared(shard)
    }


def parts_of(shard: Shard) -> DeclaredParts:
    """Return what a rank declares of a tensor."""
    boxes = (box for region in shard.pieces for box in region_boxes(region, shard.tensor.global_shape))
    return DeclaredParts(tuple(boxes), shard.holders or ())


def sums_of_parts(shards: Iterable[Shard], rank: int) -> dict[str, Sum]:
    """Return the sum of what a rank declares of each tensor, by FQN."""
    declared = {shard.tensor.fqn: parts_of(shard) for shard in shards if is_declared(shard)}
    fqns = [fqn for fqn, parts in declared.items() for _ in parts.boxes]
    sums = dict.fromkeys(declared, NO_PARTS)
    boxes = [box for parts in declared.values() for box in parts.boxes]
    for fqn, one in zip(fqns, _sums_of_boxes(fqns, boxes), strict=True):
        sums[fqn] = total((sums[fqn], one))
    for fqn, parts in declared.items():
        if len(parts.holders) > 1:
            sums[fqn] = _product(sums[fqn], _weight(parts.holders, rank))
    return sums


def sums_of_wholes(tensors: Mapping[str, DeclaredTensor]) -> dict[str, Sum]:
    """Return the sum of each tensor as a whole, by FQN."""
    boxes = [Box.whole(tensor.global_shape) for tensor in tensors.values()]
    return dict(zip(tensors, _sums_of_boxes([*tensors], boxes), strict=True))


def total(sums: Iterable[Sum]) -> Sum:
    """Return the sum of sums."""
    first = second = 0
    for one, other in sums:
        first += one
        second += other
    return first % PRIME, second % PRIME


def encode_sum(found: Sum) -> bytes:
    """Return a sum as 8 bytes."""
    return _PAIR.pack(*found)


def decode_sum(data: bytes) -> Sum:
    """Return the sum that `encode_sum` wrote."""
    first, second = _PAIR.unpack(data)
    return first, second


def problem_of(tensor: DeclaredTensor, held: Mapping[int, DeclaredParts]) -> str:
    """Return how the parts of a tensor fail to cover it exactly once, for a message.

    Args:
        tensor: The tensor.
        held: What each rank declares of it.
    """
    # A rank that states the same as the lowest of its group is compared once: all of a job may be one group.
    compared: set[int] = set()
    for rank, parts in sorted(held.items()):
        if rank in compared:
            continue
        for other in parts.holders:
            if held.get(other) != parts:
                return f"rank {rank} states replicas [{first_three(parts.holders)}]; rank {other} states other parts"
        compared.update(parts.holders)
    # Ranks with equal coordinates are replicas: one of them counts.
    counted: dict[object, int] = {}
    for rank, parts in sorted(held.items()):
        if rank == parts.holders[0]:
            counted.setdefault(parts.boxes if tensor.is_located else rank, rank)
    found = [(box, rank) for rank in counted.values() for box in held[rank].boxes]
    overlap = first_overlap([box for box, _ in found])
    if overlap is not None:
        (one, first_rank), (other_box, second_rank) = (found[number] for number in overlap)
        box, ranks = one.intersect(other_box) or one, sorted((first_rank, second_rank))
        text = f"rank {ranks[0]} holds it twice" if ranks[0] == ranks[1] else f"ranks {ranks[0]} and {ranks[1]} hold it"
        return f"{list(box.start)}–{list(box.stop)}: {text}"
    elements, all_elements = sum(box.numel for box, _ in found), Box.whole(tensor.global_shape).numel
    if elements < all_elements:
        return f"no rank holds {all_elements - elements} of {all_elements} elements"
    return f"ranks hold {elements} elements; the tensor has {all_elements}"


def _sums_of_boxes(fqns: Sequence[str], boxes: Sequence[Box]) -> list[Sum]:
    """Return the sum of each box of the tensor of that name."""
    sums: list[Sum] = [NO_PARTS] * len(boxes)
    by_ndim: dict[int, list[int]] = {}
    for number, box in enumerate(boxes):
        by_ndim.setdefault(len(box.start), []).append(number)
    for ndim, numbers in by_ndim.items():
        start = np.array([boxes[number].start for number in numbers], dtype=np.int64).reshape(len(numbers), ndim)
        stop = np.array([boxes[number].stop for number in numbers], dtype=np.int64).reshape(len(numbers), ndim)
        factors = np.array([_factors(fqns[number]) for number in numbers], dtype=np.uint64)
        columns = [
            (volumes(start, stop, key) * factors[:, key] % np.uint64(PRIME)).tolist() for key in range(factors.shape[1])
        ]
        for number, first, second in zip(numbers, *columns, strict=True):
            sums[number] = first, second
    return sums


@lru_cache(maxsize=1 << 16)
def _factors(fqn: str) -> Sum:
    """Return what the sums of a tensor are multiplied with: errors of two tensors must not cancel each other."""
    return _residues(fqn.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=1024)
def _weight(holders: tuple[int, ...], rank: int) -> Sum:
    """Return the weight of one of several replicas. They are random, and add up to one."""
    text = repr(holders).encode()
    if rank != holders[0]:
        return _residues(text, rank.to_bytes(8))
    first, second = total(_residues(text, other.to_bytes(8)) for other in holders[1:])
    return (1 - first) % PRIME, (1 - second) % PRIME


def _residues(*parts: bytes) -> Sum:
    first, second = decode_sum(short_digest_of(*parts))
    return first % PRIME, second % PRIME


def _product(one: Sum, other: Sum) -> Sum:
    return one[0] * other[0] % PRIME, one[1] * other[1] % PRIME
