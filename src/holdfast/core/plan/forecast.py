"""Forecasts what each rank of a described job would read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.base.geometry.box import Box
from holdfast.base.geometry.mesh import DescribedMesh
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.types.plan import Piece, WantedBoxes
from holdfast.core.plan.reads import load_plan


def forecast(
    mesh: DescribedMesh,
    tensors: Sequence[TensorSpec],
    pieces_near: Callable[[str, Box], Sequence[Piece]],
    run_bytes_max: int,
) -> Forecast:
    """Return what each rank would read if every tensor were laid out on a mesh.

    Args:
        mesh: The job.
        tensors: Tensors that it loads.
        pieces_near: Returns stored pieces of an FQN, at least all that overlap a box.
        run_bytes_max: Adjacent chunks are read together up to this many bytes.
    """
    shapes = {tensor.global_shape for tensor in tensors}
    ranks: list[RankForecast] = []
    for rank in range(mesh.ranks):
        twin = mesh.twin_of(rank)
        if twin < rank:  # Replicas read the same.
            ranks.append(replace(ranks[twin], rank=rank))
            continue
        # A model has few shapes and many tensors of each.
        boxes_of = {shape: mesh.boxes_on(rank, shape) for shape in shapes}
        wanted = [WantedBoxes(tensor.fqn, boxes_of[tensor.global_shape]) for tensor in tensors]
        plan = load_plan(wanted, pieces_near, run_bytes_max)
        held_bytes = sum(
            tensor.itemsize * sum(box.numel for box in boxes_of[tensor.global_shape]) for tensor in tensors
        )
        reads = [read for run in plan.runs for read in (run, *run.bases)]
        chunks = sum(len(read.chunks) for read in reads)
        ranks.append(RankForecast(rank, held_bytes, plan.bytes, chunks, len(reads)))
    return Forecast(mesh, tuple(ranks), len(tensors), sum(tensor.global_bytes for tensor in tensors))


@dataclass(frozen=True, slots=True)
class RankForecast:
    """Forecast for one rank."""

    rank: int
    """The rank."""

    held_bytes: int
    """Bytes that it would hold."""

    bytes: int
    """Bytes that it would read from storage: whole chunks, as they are stored."""

    chunks: int
    """Number of those chunks."""

    reads: int
    """Number of reads into which they are joined."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for all ranks."""

    mesh: DescribedMesh
    """The mesh."""

    ranks: tuple[RankForecast, ...]
    """One per rank, ascending."""

    tensors: int
    """Number of tensors that would be loaded."""

    stored_bytes: int
    """Bytes of those tensors, each counted once and uncompressed."""

    @property
    def bytes(self) -> int:
        """Bytes that all ranks would read together."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def imbalance(self) -> float:
        """Bytes of the rank that reads most, divided by the mean; 1.0 is balanced."""
        return max(rank.bytes for rank in self.ranks) * len(self.ranks) / self.bytes if self.bytes else 1.0
