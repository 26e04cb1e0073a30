"""A layout stated by hand, for tensors that carry none themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """What this rank holds of one tensor, in its own words: stands in the state where the tensor would.

    One box: `Sharded(tensor, global_shape=(8, 4), start=(4, 0))`. Several boxes: lists of tensors and starts.
    A run of the flattened tensor, as ZeRO holds it: `Sharded(tensor, global_shape=(8, 4), flat_start=13)` with a
    1-d tensor. The optimizer's state of a tensor passed so, where it has the tensor's local shape, lies alike.

    Every element must be held by exactly one rank, or by the `replicas` stated; saving proves it.
    """

    tensor: object
    """The local tensor, or a list of them; filled in place on load."""

    global_shape: Sequence[int]
    """Shape of the whole tensor, elements."""

    start: Sequence[int] | Sequence[Sequence[int]] | None = None
    """First coordinate of the local tensor, one number per dimension; one such per tensor for a list."""

    flat_start: int | Sequence[int] | None = None
    """Instead of `start`: row-major number of the first element; one per tensor for a list."""

    replicas: Sequence[int] | None = None
    """Ranks of the process group that hold exactly the same, this one included; None: this one alone."""
