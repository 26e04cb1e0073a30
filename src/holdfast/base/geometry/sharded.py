"""A layout declared by the user, for tensors that carry none themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """This rank's part of one tensor, as declared by the user; takes the tensor's place in the state.

    One box: `Sharded(tensor, global_shape=(8, 4), start=(4, 0))`. Several boxes: lists of tensors and starts.
    A run of the flattened tensor, as ZeRO holds it: `Sharded(tensor, global_shape=(8, 4), flat_start=13)` with a
    1-d tensor. Optimizer state with the tensor's local shape gets the same layout.

    Exactly one rank, or exactly the declared `replicas`, must hold each element; a save checks it before it writes.
    """

    tensor: object
    """The local tensor, or a list of them; filled in place on load."""

    global_shape: Sequence[int]
    """Shape of the whole tensor, elements."""

    start: Sequence[int] | Sequence[Sequence[int]] | None = None
    """First coordinate of the local tensor, one number per dimension; for a list, one coordinate per tensor."""

    flat_start: int | Sequence[int] | None = None
    """Instead of `start`: row-major number of the first element; for a list, one number per tensor."""

    replicas: Sequence[int] | None = None
    """Ranks of the process group that hold the same part, this one included; None: only this one."""
