"""Tensors, their layout in a job, and the shards that one rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from holdfast.base.geometry.dtype import DTYPES
from holdfast.base.geometry.region import Region
from holdfast.base.geometry.value_class import value_class


@value_class
class TensorSpec:
    """A tensor in a checkpoint, independent of any rank."""

    fqn: str
    """Dotted name of the leaf."""

    dtype: str
    """Element type by name, a key of `DTYPES`."""

    global_shape: tuple[int, ...]
    """Elements along each dimension of the whole tensor."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.global_shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a tensor on one mesh dimension: split along `dim`, or whole on every rank."""

    dim: int | None
    """Tensor dimension that is split; None for Replicate."""

    split: int = 1
    """Runs the dimension is cut into before each rank takes its part of every run (`_StridedShard`); 1 for Shard."""

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate"
        return f"Shard({self.dim})" if self.split == 1 else f"_StridedShard({self.dim}, split={self.split})"


@value_class
class Mesh:
    """A grid of ranks."""

    shape: tuple[int, ...]
    """Ranks along each dimension."""

    ranks: tuple[int, ...]
    """Ranks of the process group, in row-major order of the mesh."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A mesh and the placements of a tensor on it; the same value on every rank of the mesh."""

    mesh_shape: tuple[int, ...]
    """Ranks along each mesh dimension."""

    mesh_ranks: tuple[int, ...]
    """Ranks of the process group, in row-major order of the mesh."""

    placements: tuple[Placement, ...]
    """One placement per mesh dimension."""

    @property
    def mesh(self) -> Mesh:
        """The mesh alone."""
        return Mesh(self.mesh_shape, self.mesh_ranks)


class Role(Enum):
    """Role of a plain tensor; decides whether its copies must agree."""

    PARAMETER = "parameter"
    """A parameter: copies on several ranks must agree."""

    OPTIMIZER = "optimizer"
    """Optimizer state: copies on several ranks must agree."""

    BUFFER = "buffer"
    """Anything else: taken whole from the lowest rank that holds it."""


@value_class
class Shard:
    """The part of one tensor that one rank holds."""

    tensor: TensorSpec
    """The tensor."""

    layout: MeshLayout | None
    """Mesh and placements, to record them and to compare ranks; None without a mesh."""

    holders: tuple[int, ...] | None
    """Ranks that declare the same pieces, ascending; None for a plain tensor, which declares nothing."""

    role: Role
    """Whether copies of a plain tensor must agree."""

    pieces: tuple[Region, ...]
    """Held boxes or flat ranges; empty if the split leaves nothing for this rank."""

    is_located: bool = False
    """Whether the tensor carries its coordinates, so that ranks with equal pieces are replicas."""

    @property
    def bytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.numel for piece in self.pieces) * self.tensor.itemsize
