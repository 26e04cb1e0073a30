"""The boxes of a tensor that each rank of a mesh holds, computed without communication."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.region import coordinate_at, row_major
from holdfast.base.geometry.tensor import Mesh, MeshLayout, Placement

Run = tuple[int, int]
"""A half-open run of coordinates of one dimension."""


def coordinate_of(layout: MeshLayout, rank: int) -> tuple[int, ...]:
    """Return a rank's coordinate on the mesh of `layout`; the rank must be on it."""
    return coordinate_at(layout.mesh_ranks.index(rank), layout.mesh_shape)


def held_boxes(
    layout: MeshLayout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[Box, Box], ...]:
    """Return the boxes that the rank at a mesh coordinate holds, each with its box in the rank's local tensor.

    Placements apply left to right: each cuts what the ones before it left, taken as one run. `Shard` cuts it into
    ceil-sized runs, as `torch.chunk` does, so the last ranks may hold less or nothing. `_StridedShard` first cuts
    it into `split` runs and takes its part of each, so a rank may end with several boxes.

    Args:
        layout: Mesh and placements.
        global_shape: Shape of the whole tensor, elements.
        coordinate: One number per mesh dimension.
    Returns:
        Pairs of a box in global and the same box in local coordinates; empty where the split leaves nothing.
    """
    return _held(zip(layout.placements, layout.mesh_shape, coordinate, strict=True), global_shape)


def held_boxes_in_shard_order(
    layout: MeshLayout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[Box, Box], ...]:
    """Return what the rank holds if every `_StridedShard` was cut after the mesh dimensions that its split counts.

    This is how `fully_shard` comes to a local tensor: it cuts what tensor parallelism left and states
    `_StridedShard` afterwards. The two ways agree where lengths divide evenly, and may not where they do not.

    Source: `DTensorSpec._maybe_convert_StridedShard_to_shard_order` of torch 2.13.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(layout.placements))):
        placement = layout.placements[mesh_dim]
        ranks_before = 1
        for position in range(len(order) + 1):
            if placement.dim is None or ranks_before == placement.split:
                order.insert(position, mesh_dim)
                break
            if position < len(order) and layout.placements[order[position]].dim == placement.dim:
                ranks_before *= layout.mesh_shape[order[position]]
        else:
            # No order of plain cuts comes to this split, so it can only be meant as it is stated.
            return held_boxes(layout, global_shape, coordinate)
    cuts = ((Placement(layout.placements[each].dim), layout.mesh_shape[each], coordinate[each]) for each in order)
    return _held(cuts, global_shape)


def _held(cuts: Iterable[tuple[Placement, int, int]], global_shape: tuple[int, ...]) -> tuple[tuple[Box, Box], ...]:
    """Return the boxes left after successive cuts; a cut is a placement, its number of ranks, and one of them."""
    runs: list[list[Run]] = [[(0, length)] for length in global_shape]
    for placement, ranks, at in cuts:
        dim = placement.dim
        if dim is None:
            continue
        if global_shape[dim] == 0:
            # An empty tensor has one empty piece, held by the first rank of the split.
            if at:
                return ()
            continue
        runs[dim] = _taken(runs[dim], placement, ranks, at)
        if not runs[dim]:
            return ()
    held = []
    for numbers in product(*(range(len(each)) for each in runs)):
        box = [runs[dim][number] for dim, number in enumerate(numbers)]
        local = [_local(runs[dim], number) for dim, number in enumerate(numbers)]
        held.append((_box(box), _box(local)))
    return tuple(held)


def boxes_at(layout: MeshLayout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the boxes that the rank at a mesh coordinate holds, in global coordinates."""
    return tuple(box for box, _ in held_boxes(layout, global_shape, coordinate))


def replica_ranks(layout: MeshLayout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same boxes as the one at `coordinate` through Replicate, ascending."""
    return sibling_ranks(layout, coordinate, (layout.mesh,))


def sibling_ranks(layout: MeshLayout, coordinate: tuple[int, ...], meshes: Iterable[Mesh]) -> tuple[int, ...]:
    """Return the ranks of sibling meshes that hold the same boxes as the one at `coordinate`, ascending.

    Args:
        layout: Placements, and a mesh of the shape that all the meshes have.
        coordinate: One number per mesh dimension.
        meshes: Disjoint meshes that hold the same tensor.
    """
    choices = [
        range(ranks) if placement.dim is None else (at,)
        for ranks, at, placement in zip(layout.mesh_shape, coordinate, layout.placements, strict=True)
    ]
    positions = [row_major(position, layout.mesh_shape) for position in product(*choices)]
    return tuple(sorted(mesh.ranks[position] for mesh in meshes for position in positions))


def _taken(runs: list[Run], placement: Placement, ranks: int, at: int) -> list[Run]:
    """Return what one rank of a mesh dimension takes of a dimension's runs, joined end to end."""
    length = sum(b - a for a, b in runs)
    cut = -(-length // placement.split)
    taken: list[Run] = []
    for first in range(0, length, cut):
        last = min(first + cut, length)
        share = -(-(last - first) // ranks)
        start = min(first + at * share, last)
        taken += _section(runs, start, min(start + share, last))
    return _joined(taken)


def _section(runs: list[Run], start: int, stop: int) -> list[Run]:
    """Return the coordinates behind positions `[start, stop)` of runs joined end to end."""
    found = []
    position = 0
    for a, b in runs:
        low, high = max(start, position), min(stop, position + b - a)
        if low < high:
            found.append((a + low - position, a + high - position))
        position += b - a
    return found


def _joined(runs: list[Run]) -> list[Run]:
    """Return runs with neighbours merged."""
    merged: list[Run] = []
    for a, b in runs:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return merged


def _local(runs: list[Run], number: int) -> Run:
    ends = list(accumulate(b - a for a, b in runs))
    return (ends[number - 1] if number else 0), ends[number]


def _box(runs: list[Run]) -> Box:
    return Box(tuple(a for a, _ in runs), tuple(b for _, b in runs))
