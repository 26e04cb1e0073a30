"""A tensor of a checkpoint as its reader sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a checkpoint."""

    dtype: str
    """Name of its dtype, e.g. `bfloat16`."""

    shape: tuple[int, ...]
    """Global shape, elements."""

    bytes: int
    """Size of the whole tensor."""
