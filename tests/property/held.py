"""Random ways in which a job may hold a tensor: plain, by mesh and placements, or declared by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from hypothesis import strategies as st

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import FlatRange, Region
from holdfast.base.geometry.tensor import MeshLayout, Placement

SPLIT_MAX = 4
Declared = Mapping[int, tuple[Region, ...]]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """How one job holds a tensor; plain if neither is given."""

    layout: MeshLayout | None = None
    declared: Declared | None = None
    siblings: tuple[MeshLayout, ...] = ()


# Hypothesis looks through each new strategy before the first draw, which takes longer than the draw: equal ones are
# made once.
@cache
def permuted(world_size: int) -> st.SearchStrategy[list[int]]:
    """All ranks, in any order."""
    return st.permutations(range(world_size))


@cache
@st.composite
def meshes(draw: st.DrawFn, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A mesh of 1 to 3 dimensions over some or all ranks, in any order."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, world_size // math.prod(shape))))
    ranks = draw(permuted(world_size))[: math.prod(shape)]
    return tuple(shape), tuple(ranks)


@cache
@st.composite
def placements(draw: st.DrawFn, ndim: int) -> Placement:
    """Replicate, Shard or _StridedShard."""
    dim = draw(st.one_of(st.none(), st.integers(0, ndim - 1))) if ndim else None
    return Placement(dim) if dim is None else Placement(dim, draw(st.integers(1, SPLIT_MAX)))


@cache
@st.composite
def layouts(draw: st.DrawFn, world_size: int, ndim: int) -> MeshLayout:
    """A mesh, and for each of its dimensions any placement, the same dimension of the tensor several times included."""
    shape, ranks = draw(meshes(world_size))
    return MeshLayout(shape, ranks, tuple(draw(placements(ndim)) for _ in shape))


@cache
@st.composite
def flat_runs(draw: st.DrawFn, numel: int, parts: int) -> list[Region]:
    """The flattened tensor cut into runs: evenly as ZeRO does, or anywhere, through rows and with empty runs."""
    if draw(st.booleans()):
        share = -(-numel // parts)
        cuts = [min(number * share, numel) for number in range(parts + 1)]
    else:
        inner = draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1))
        cuts = [0, *sorted(inner), numel]
    return [FlatRange(a, b) for a, b in pairwise(cuts)]


@cache
@st.composite
def guillotine(draw: st.DrawFn, shape: tuple[int, ...], parts: int) -> list[Region]:
    """The tensor cut into boxes, each cut going right through one box of those before it."""
    boxes = [Box.whole(shape)]
    for _ in range(parts - 1):
        number = draw(st.integers(0, len(boxes) - 1))
        longer = [dim for dim, length in enumerate(boxes[number].shape) if length > 1]
        if not longer:
            continue
        dim = draw(st.sampled_from(longer))
        box = boxes.pop(number)
        at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
        boxes += [
            Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])),
            Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop),
        ]
    return list(boxes)


@cache
@st.composite
def declared(draw: st.DrawFn, world_size: int, shape: tuple[int, ...]) -> Declared:
    """Every element stated to lie on one group of replicas, as flat ranges or as boxes; groups share no rank."""
    ranks = draw(permuted(world_size))
    groups: list[tuple[int, ...]] = []
    while len(ranks) > 0 and (not groups or draw(st.integers(0, 5))):
        members = draw(st.integers(1, min(len(ranks), 3)))
        groups.append(tuple(ranks[:members]))
        ranks = ranks[members:]
    parts = draw(st.integers(1, 3)) * len(groups)
    numel = math.prod(shape)
    regions = draw(st.one_of(flat_runs(numel, parts), guillotine(shape, parts)))
    if numel:
        regions = [region for region in regions if region.numel]
    round_robin = draw(st.booleans())
    dealt: dict[tuple[int, ...], list[Region]] = {group: [] for group in groups}
    for number, region in enumerate(regions if numel else regions[:1]):
        choice = number * len(groups) // len(regions) if not round_robin else number % len(groups)
        dealt[groups[choice]].append(region)
    return {rank: tuple(held) for group, held in dealt.items() for rank in group}


@cache
@st.composite
def siblings(draw: st.DrawFn, world_size: int, ndim: int) -> LocalShards:
    """Disjoint meshes of one shape over some or all ranks, in any order, all with the same placements."""
    shape, ranks = draw(meshes(max(world_size // 2, 1)))
    chosen = tuple(draw(placements(ndim)) for _ in shape)
    others = draw(permuted(world_size))
    count = draw(st.integers(1, world_size // len(ranks)))
    first, *rest = (
        MeshLayout(shape, tuple(others[number * len(ranks) : (number + 1) * len(ranks)]), chosen)
        for number in range(count)
    )
    return LocalShards(first, siblings=tuple(rest))


@cache
@st.composite
def any_held(draw: st.DrawFn, world_size: int, shape: tuple[int, ...], shared: tuple[MeshLayout, ...]) -> LocalShards:
    """Any way to hold a tensor, most often on a mesh that others share, as in a real model."""
    kind = draw(st.integers(0, 7))
    if kind == 7:
        return draw(siblings(world_size, len(shape)))
    if kind == 0:
        return LocalShards()
    if kind <= 3:
        return LocalShards(declared=draw(declared(world_size, shape)))
    if kind == 4 or not shared:
        return LocalShards(draw(layouts(world_size, len(shape))))
    mesh = draw(st.sampled_from(shared))
    chosen = tuple(draw(placements(len(shape))) for _ in mesh.mesh_shape)
    return LocalShards(MeshLayout(mesh.mesh_shape, mesh.mesh_ranks, chosen))
