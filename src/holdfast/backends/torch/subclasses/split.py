"""How the inner tensors of a subclass lie in the whole, if a DTensor splits it over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import Ranks, on_mesh
from holdfast.backends.torch.subclasses.known import KnownClass, Rule
from holdfast.base.geometry.box import Box
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of a tensor subclass."""

    kind: str
    """Name of the class, for messages."""

    known: KnownClass | None
    """How inner tensors follow the elements. None: they are stored part by part, and load on the same split only."""

    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    box: Box
    """This rank's elements."""

    holders: tuple[int, ...]
    """Ranks that hold the same."""

    ranks: tuple[int, ...]
    """All ranks of the mesh."""

    grid: tuple[int, ...] | None
    """Number of parts in each dimension; None if there is one, or if inner tensors follow the elements."""

    def part(self, path: str, name: str, tensor: torch.Tensor) -> Sharded:
        """Return which part of the whole an inner tensor is.

        Args:
            path: Its name in the checkpoint.
            name: Its attribute.
            tensor: The inner tensor of this rank.
        Raises:
            InvalidError: It does not follow the elements as is known of its class.
        """
        rule = None if self.known is None else self.known.rules.get(name)
        if rule is Rule.ELEMENTS and tuple(tensor.shape) == self.box.shape:
            return Sharded(tensor, self.global_shape, self.box.start, replicas=self.holders)
        if rule is Rule.WHOLE:
            return Sharded(tensor, tuple(tensor.shape), (0,) * tensor.ndim, replicas=self.ranks)
        if rule is Rule.RUNS and tensor.ndim == 1 and tensor.numel():
            run, rest = divmod(self.box.numel, tensor.numel())
            start = _flat_start(self.box, self.global_shape)
            elements = prod(self.global_shape)
            if run and not rest and not start % run and not elements % run:
                return Sharded(tensor, (elements // run,), (start // run,), replicas=self.holders)
        if self.known is not None:
            raise InvalidError(
                f"{path}: this rank's part {self.box} of {self.kind} {list(self.global_shape)} does not end at the end "
                f"of a block (inner tensor {list(tensor.shape)}), so it cannot be put together; expected shards of "
                "whole blocks. Use another number of ranks, or leave it out with skip="
            )
        if self.grid is None:
            return Sharded(tensor, tuple(tensor.shape), (0,) * tensor.ndim, replicas=self.holders)
        number = 0
        for start, length, count in zip(self.box.start, self.box.shape, self.grid, strict=True):
            number = number * count + start // length
        shape = (prod(self.grid), *tensor.shape)
        return Sharded(tensor.unsqueeze(0), shape, (number, *(0 for _ in tensor.shape)), replicas=self.holders)


def split_of(fqn: str, tensor: DTensor, local: torch.Tensor, known: KnownClass | None, ranks: Ranks) -> Split:
    """Return this rank's part of a DTensor whose local tensor is a subclass.

    Raises:
        InvalidError: This rank has several parts of it or none, or parts of unequal size of a class that is not known.
    """
    kind, global_shape = type(local).__name__, tuple(tensor.shape)
    held = on_mesh(tensor, fqn, ranks)
    layout, boxes = held.layout, held.boxes
    if not boxes and known is not None and not known.has_runs and 0 in local.shape:
        start = tuple(0 if length else whole for length, whole in zip(local.shape, global_shape, strict=True))
        nothing = Box(start, tuple(first + length for first, length in zip(start, local.shape, strict=True)))
        return Split(kind, known, global_shape, nothing, (ranks.rank,), layout.mesh_ranks, None)
    if len(boxes) != 1:
        raise InvalidError(
            f"{fqn}: the split of {kind} {list(global_shape)} gives this rank {len(boxes)} parts; expected one. Use "
            "another number of ranks, or leave it out with skip="
        )
    box = boxes[0][0]
    if known is not None and (not known.has_runs or _is_run(box, global_shape)):
        return Split(kind, known, global_shape, box, held.holders, layout.mesh_ranks, None)
    if any(whole % part or start % part for whole, part, start in zip(global_shape, box.shape, box.start, strict=True)):
        raise InvalidError(
            f"{fqn}: {kind} {list(global_shape)} is split into shards of unequal size (this rank holds {box}), and "
            "Holdfast does not know how its inner tensors follow; expected equal shards. Use another number of ranks, "
            "or leave it out with skip="
        )
    grid = tuple(whole // part for whole, part in zip(global_shape, box.shape, strict=True))
    return Split(kind, None, global_shape, box, held.holders, layout.mesh_ranks, grid if prod(grid) > 1 else None)


def _is_run(box: Box, global_shape: tuple[int, ...]) -> bool:
    """Return whether the elements of a box are one run of the whole's, in row-major order."""
    first = next((dim for dim, length in enumerate(box.shape) if length != 1), len(global_shape))
    return all(length == whole for length, whole in zip(box.shape[first + 1 :], global_shape[first + 1 :], strict=True))


def _flat_start(box: Box, global_shape: tuple[int, ...]) -> int:
    """Return the position of a box's first element in the whole, in row-major order."""
    position = 0
    for start, whole in zip(box.start, global_shape, strict=True):
        position = position * whole + start
    return position
