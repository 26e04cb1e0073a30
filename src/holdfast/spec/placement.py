"""Where a tensor lies on a mesh, derived by every rank for itself."""

from __future__ import annotations

import math
from itertools import product

from holdfast.spec.box import Box
from holdfast.spec.tensor import Layout


def coordinate_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return a rank's coordinate on the mesh of `layout`; the rank must be on it."""
    number = layout.mesh_ranks.index(rank)
    coordinate = []
    for length in reversed(layout.mesh_shape):
        number, at = divmod(number, length)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def box_at(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box | None:
    """Return the box that the rank at a mesh coordinate holds, or None where the split leaves it nothing.

    Placements apply left to right: each `Shard` cuts what the ones before it left into ceil-sized runs, as
    `torch.chunk` does, so the last ranks may hold less or nothing.

    Args:
        layout: Mesh and placements.
        global_shape: Shape of the whole tensor, elements.
        coordinate: One number per mesh dimension.
    """
    start = list((0,) * len(global_shape))
    length = list(global_shape)
    for ranks, at, placement in zip(layout.mesh_shape, coordinate, layout.placements, strict=True):
        dim = placement.dim
        if dim is None:
            continue
        run = -(-length[dim] // ranks)
        first = min(at * run, length[dim])
        last = min(first + run, length[dim])
        start[dim] += first
        length[dim] = last - first
        if last == first and (at or global_shape[dim]):
            return None
    return Box(tuple(start), tuple(a + n for a, n in zip(start, length, strict=True)))


def replica_ranks(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same box as the one at `coordinate` through Replicate, ascending."""
    choices = [
        range(ranks) if placement.dim is None else (at,)
        for ranks, at, placement in zip(layout.mesh_shape, coordinate, layout.placements, strict=True)
    ]
    strides = [math.prod(layout.mesh_shape[d + 1 :]) for d in range(len(layout.mesh_shape))]
    numbers = (sum(at * stride for at, stride in zip(where, strides, strict=True)) for where in product(*choices))
    return tuple(sorted(layout.mesh_ranks[number] for number in numbers))
