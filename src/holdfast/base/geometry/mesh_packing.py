"""Packs meshes into a few numbers, because every rank of a job reads them.

`init_device_mesh` numbers ranks with one stride per dimension, and the meshes of one dimension are shifted copies of
each other. So a thousand meshes take two short lists of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.geometry.rank_ranges import RankRanges, rank_ranges, ranks_in
from holdfast.base.geometry.tensor import Mesh


@dataclass(frozen=True, slots=True)
class PackedMeshes:
    """Meshes that are shifted copies of each other."""

    shape: tuple[int, ...]
    """Ranks along each dimension."""

    offsets: tuple[int, ...]
    """Distance of ranks from the first rank: one stride per dimension, else one number per rank."""

    is_strided: bool
    """Whether `offsets` holds strides."""

    firsts: RankRanges
    """First rank of each mesh."""


def packed(meshes: Iterable[Mesh]) -> list[PackedMeshes]:
    """Return meshes in packed form; their order is lost."""
    firsts: dict[tuple[tuple[int, ...], tuple[int, ...], bool], list[int]] = {}
    for mesh in meshes:
        offsets, is_strided = _offsets(mesh)
        firsts.setdefault((mesh.shape, offsets, is_strided), []).append(mesh.ranks[0])
    return [PackedMeshes(*key, rank_ranges(sorted(ranks))) for key, ranks in firsts.items()]


def unpacked(packs: Iterable[PackedMeshes]) -> list[Mesh]:
    """Return the meshes that `packed` packed."""
    meshes: list[Mesh] = []
    for pack in packs:
        distances = _distances(pack.shape, pack.offsets) if pack.is_strided else pack.offsets
        meshes += [Mesh(pack.shape, tuple(first + each for each in distances)) for first in ranks_in(pack.firsts)]
    return meshes


def _offsets(mesh: Mesh) -> tuple[tuple[int, ...], bool]:
    """Return the strides of a mesh and True, or the distance of every rank from the first and False."""
    first = mesh.ranks[0]
    strides: list[int] = []
    step = len(mesh.ranks)  # Ranks between neighbours along a dimension, in row-major order.
    for length in mesh.shape:
        step //= length
        strides.append(mesh.ranks[step] - first if length > 1 else 0)
    distances = tuple(rank - first for rank in mesh.ranks)
    return (tuple(strides), True) if _distances(mesh.shape, strides) == distances else (distances, False)


def _distances(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the distance of every rank from the first, in row-major order."""
    distances = [0]
    for length, stride in zip(shape, strides, strict=True):
        distances = [distance + at * stride for distance in distances for at in range(length)]
    return tuple(distances)
