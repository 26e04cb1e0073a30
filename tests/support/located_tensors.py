"""Tensors that carry their coordinates, as PyTorch's `CheckpointableTensor` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

Piece = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""First coordinate in the whole tensor, first coordinate in the local one, and shape."""

Kind = TypeVar("Kind", bound=torch.Tensor)


def carrying(tensor: Kind, global_shape: Sequence[int], pieces: Sequence[Piece]) -> Kind:
    """Return the tensor with coordinates."""
    attributes = zip(*pieces, strict=True) if pieces else ((), (), ())
    for name, value in zip(("global_offsets", "local_offsets", "local_sizes"), attributes, strict=True):
        setattr(tensor, name, tuple(value))
    setattr(tensor, "global_shape", tuple(global_shape))  # noqa: B010 - torch declares no such attribute
    return tensor


def part_of(
    whole: torch.Tensor, local_shape: Sequence[int], pieces: Sequence[Piece], padding: float = -1
) -> torch.Tensor:
    """Return the local tensor that holds some pieces of a whole one."""
    local = torch.full(tuple(local_shape), padding, dtype=whole.dtype)
    for start, inner, size in pieces:
        local[_slices(inner, size)] = whole[_slices(start, size)]
    return carrying(local, whole.shape, pieces)


def _slices(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))
