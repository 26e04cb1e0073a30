"""The meshes of one rank's DTensors, numbered in the order of the tensors, so that ranks can compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.base.geometry.mesh_packing import packed
from holdfast.base.geometry.placement import coordinate_of, sibling_ranks
from holdfast.base.geometry.tensor import Mesh, MeshLayout, Role, Shard
from holdfast.core.format.digest import short_digest_of
from holdfast.core.plan.siblings import TensorOnMesh
from holdfast.training.coordination.agreement.records import StatedMesh


@dataclass(frozen=True, slots=True)
class _NumberedLayout:
    layout: MeshLayout
    """A reference, so that no other layout gets the same `id`."""

    slot: int | None
    text: str


class MeshNumbers:
    """Numbers the meshes of a rank. Ranks of equal tensors on different meshes number them equally."""

    def __init__(self, rank: int) -> None:
        """Know no mesh yet."""
        self.rank = rank
        """The rank."""
        self._slots: dict[Mesh, int] = {}
        # Thousands of tensors share a few layouts, and a layout may list thousands of ranks: look at each once.
        self._known: dict[int, _NumberedLayout] = {}
        self._holders: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def stated(self) -> tuple[StatedMesh, ...]:
        """The meshes by slot, as this rank states them."""
        return tuple(
            StatedMesh(_digest(mesh), mesh.ranks[0], packed([mesh])[0] if mesh.ranks[0] == self.rank else None)
            for mesh in self._slots
        )

    def text_of(self, layout: MeshLayout | None) -> str:
        """Return a text that is equal on ranks with equal placements in one slot."""
        return "" if layout is None else self._find(layout).text

    def slot_of(self, layout: MeshLayout | None) -> int | None:
        """Return the number of a layout's mesh; None without a mesh, and for a rank outside the mesh."""
        return None if layout is None else self._find(layout).slot

    def tensor_of(self, shard: Shard) -> TensorOnMesh | None:
        """Return how this rank holds a DTensor; None for any other tensor, and for a rank outside the mesh."""
        slot, tensor = self.slot_of(shard.layout), shard.tensor
        if slot is None or shard.layout is None:
            return None
        placements = tuple(map(str, shard.layout.placements))
        return TensorOnMesh(slot, tensor.dtype, tensor.global_shape, placements, shard.role is Role.OPTIMIZER)

    def holders(self, shard: Shard, meshes: Sequence[Mesh], family: int) -> tuple[int, ...]:
        """Return the ranks of sibling meshes that hold the same part of a DTensor as this rank, ascending.

        Args:
            shard: The DTensor.
            meshes: All siblings.
            family: Number that stands for `meshes`.
        """
        layout = shard.layout
        if layout is None:  # A tensor with coordinates: each mesh is one rank.
            return tuple(sorted(mesh.ranks[0] for mesh in meshes))
        key = id(layout), family
        if key not in self._holders:
            self._holders[key] = sibling_ranks(layout, coordinate_of(layout, self.rank), meshes)
        return self._holders[key]

    def _find(self, layout: MeshLayout) -> _NumberedLayout:
        known = self._known.get(id(layout))
        if known is None:
            mesh = layout.mesh
            if self.rank in mesh.ranks:
                slot = self._slots.setdefault(mesh, len(self._slots))
                known = _NumberedLayout(layout, slot, repr((slot, mesh.shape, list(map(str, layout.placements)))))
            else:
                # A rank outside the mesh holds no part of the tensor, but the state of the rank names the tensor.
                known = _NumberedLayout(layout, None, repr(layout))
            self._known[id(layout)] = known
        return known


def _digest(mesh: Mesh) -> str:
    return short_digest_of(repr((mesh.shape, mesh.ranks)).encode()).hex()
