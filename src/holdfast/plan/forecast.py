"""What each rank of a described job would read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.geometry.box import Box
from holdfast.geometry.mesh import DescribedMesh
from holdfast.geometry.tensor import TensorSpec
from holdfast.plan.reads import WantedBoxes, load_plan
from holdfast.types.plan import Piece


def forecast(
    mesh: DescribedMesh,
    tensors: Sequence[TensorSpec],
    pieces_near: Callable[[str, Box], Sequence[Piece]],
    run_bytes_max: int,
) -> Forecast:
    """Return what each rank would read, were every tensor laid out on a mesh.

    Args:
        mesh: The job.
        tensors: What it loads.
        pieces_near: Stored pieces of an FQN, all that share an element with a box among them.
        run_bytes_max: Neighbouring chunks are read together up to this many bytes.
    """
    ranks: list[RankForecast] = []
    for rank in range(mesh.ranks):
        twin = mesh.twin_of(rank)
        # Replicas read the same; a rank's twin has been reckoned up before it.
        ranks.append(
            replace(ranks[twin], rank=rank)
            if twin < rank
            else _on_rank(mesh, rank, tensors, pieces_near, run_bytes_max)
        )
    return Forecast(mesh, tuple(ranks), len(tensors), sum(tensor.global_bytes for tensor in tensors))


def _on_rank(
    mesh: DescribedMesh,
    rank: int,
    tensors: Sequence[TensorSpec],
    pieces_near: Callable[[str, Box], Sequence[Piece]],
    run_bytes_max: int,
) -> RankForecast:
    # A model has few shapes and many tensors of each.
    boxes_by_shape = {shape: mesh.boxes_on(rank, shape) for shape in {tensor.global_shape for tensor in tensors}}
    boxes_of = {tensor.fqn: boxes_by_shape[tensor.global_shape] for tensor in tensors}
    plan = load_plan(
        [WantedBoxes(fqn, boxes) for fqn, boxes in boxes_of.items()],
        pieces_near,
        run_bytes_max,
    )
    return RankForecast(
        rank=rank,
        held_bytes=sum(tensor.itemsize * sum(box.numel for box in boxes_of[tensor.fqn]) for tensor in tensors),
        bytes=plan.bytes,
        chunks=sum(len(run.chunks) for run in plan.runs),
        reads=len(plan.runs),
    )


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What one rank would read."""

    rank: int
    """The rank."""

    held_bytes: int
    """Bytes of what it would hold."""

    bytes: int
    """Bytes it would read from storage: whole chunks, so no less than what it holds."""

    chunks: int
    """Chunks these are."""

    reads: int
    """Reads they are joined into."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What every rank would read."""

    mesh: DescribedMesh
    """The mesh."""

    ranks: tuple[RankForecast, ...]
    """One per rank, ascending."""

    tensors: int
    """Tensors that would be loaded."""

    stored_bytes: int
    """Bytes of these as stored, each once."""

    @property
    def bytes(self) -> int:
        """Bytes that all ranks would read together."""
        return sum(each.bytes for each in self.ranks)

    @property
    def imbalance(self) -> float:
        """Bytes of the rank that reads most over the mean; 1.0 is even."""
        return max(each.bytes for each in self.ranks) * len(self.ranks) / self.bytes if self.bytes else 1.0
