"""What a load on some mesh would read, told before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spec.mesh import DescribedMesh


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
