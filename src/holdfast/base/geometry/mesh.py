"""A short description of a job: its mesh, and the placement of every tensor on it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.placement import held_boxes_in_shard_order
from holdfast.base.geometry.region import coordinate_at, row_major
from holdfast.base.geometry.tensor import MeshLayout, Placement
from holdfast.errors import InvalidError

RANKS_MAX = 65_536
DIMENSIONS_MAX = 8

MESH_GRAMMAR = (
    "name=size[:placement] for each mesh dimension, outermost first, commas between, e.g. 'dp=2,fsdp=4' or "
    "'fsdp=4,tp=2:S1'; placement is R (whole on every rank), S0, S1, … (split along that tensor dimension) or S0/2 "
    "(split after 2 ranks to its right have been); left out, dp and replicate mean R, shard and tp mean S0, and fsdp "
    f"splits dimension 0 after everything to its right; at most {DIMENSIONS_MAX} dimensions and {RANKS_MAX} ranks"
)
"""The language of `described_mesh`."""

_DIMENSION = re.compile(r"([a-z][a-z0-9_]{0,31})=([1-9][0-9]{0,5})(?::(R|S[0-9]{1,2}(?:/[1-9][0-9]{0,5})?))?", re.ASCII)
_WHOLE = ("dp", "replicate")
_SPLIT = ("shard", "tp")


@dataclass(frozen=True, slots=True)
class DescribedMesh:
    """Mesh dimensions, and one placement on each for all tensors alike."""

    names: tuple[str, ...]
    """Names of the dimensions, outermost first."""

    shape: tuple[int, ...]
    """Ranks along each."""

    placements: tuple[Placement, ...]
    """Placement of a tensor on each dimension, if the tensor has that many."""

    @property
    def ranks(self) -> int:
        """Count of ranks."""
        return math.prod(self.shape)

    def layout_of(self, global_shape: tuple[int, ...]) -> MeshLayout:
        """Return the layout of a tensor; it is whole on a mesh dimension that splits a dimension it does not have."""
        placements = (
            Placement(None) if placement.dim is not None and placement.dim >= len(global_shape) else placement
            for placement in self.placements
        )
        return MeshLayout(self.shape, tuple(range(self.ranks)), tuple(placements))

    def boxes_on(self, rank: int, global_shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return what a rank holds of a tensor, in global coordinates."""
        layout, position = self.layout_of(global_shape), coordinate_at(rank, self.shape)
        return tuple(box for box, _ in held_boxes_in_shard_order(layout, global_shape, position))

    def twin_of(self, rank: int) -> int:
        """Return the lowest rank that holds the same of every tensor."""
        own = zip(coordinate_at(rank, self.shape), self.placements, strict=True)
        return row_major(tuple(0 if placement.dim is None else position for position, placement in own), self.shape)


def described_mesh(text: str) -> DescribedMesh:
    """Return the mesh that a text such as `dp=2,fsdp=4` describes.

    Raises:
        InvalidError: It does not keep to `MESH_GRAMMAR`.
    """
    names: list[str] = []
    shape: list[int] = []
    stated: list[str] = []
    for dimension in text.split(","):
        match = _DIMENSION.fullmatch(dimension)
        if match is None:
            raise _refusal(text, f"{dimension[:40]!r} is no mesh dimension")
        name, size, placement = match[1], int(match[2]), match[3] or ""
        if name in names:
            raise _refusal(text, f"{name} is named twice")
        if not placement and name not in (*_WHOLE, *_SPLIT, "fsdp"):
            raise _refusal(
                text, f"{name} says nothing of how tensors lie on it: write {name}={size}:R or {name}={size}:S0"
            )
        names.append(name)
        shape.append(size)
        stated.append(placement)
    if len(names) > DIMENSIONS_MAX or math.prod(shape) > RANKS_MAX:
        raise _refusal(text, f"{len(names)} dimensions, {math.prod(shape)} ranks")
    placements: list[Placement] = []
    for at in reversed(range(len(names))):
        # fully_shard cuts what tensor parallelism left, so its part is strided where both cut one dimension.
        inner = math.prod(
            size for size, each in zip(shape[at + 1 :], reversed(placements), strict=True) if each.dim == 0
        )
        placements.append(_placement(names[at], stated[at], inner))
    return DescribedMesh(tuple(names), tuple(shape), tuple(reversed(placements)))


def _placement(name: str, stated: str, inner: int) -> Placement:
    if stated == "R" or (not stated and name in _WHOLE):
        return Placement(None)
    if stated:
        dim, _, split = stated[1:].partition("/")
        return Placement(int(dim), int(split or 1))
    return Placement(0, inner if name == "fsdp" else 1)


def _refusal(text: str, why: str) -> InvalidError:
    return InvalidError(f"mesh {text[:80]!r}: {why}; expected {MESH_GRAMMAR}")
