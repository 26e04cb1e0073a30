"""The storages that the ops of one call touch.

A storage is recognised by a weak reference. An address is no identity: memory that is released comes back under the
same address within one forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from holdfast.backends.torch.private_layout import WeakStorage, registered, storage_identity


@dataclass(slots=True, eq=False)
class SeenStorage:
    """One storage."""

    weak: WeakStorage
    """Holds the storage's identity, not its memory."""
    group: int | None = None
    """The op that made the storage; 0 for the unit's input, None for storages from outside."""
    slot: int = 0
    """Number of the storage within the group."""
    is_watched: bool = False
    """For a storage from outside: whether a replay notices changes (parameters, buffers), or none occur (constants)."""
    is_registered: bool = False
    """Whether a parameter or buffer of the unit shows the storage."""
    cast_of: SeenStorage | None = None
    """The parameter or buffer of which this is a cast."""
    is_blank: bool = False
    """Whether an op made the storage and none has written to it."""
    writes: int = 0
    """How many ops have changed the storage so far."""
    reads: list[tuple[int, int]] = field(default_factory=list)
    """Ops of other groups that read the storage, each with the number of writes before."""
    saves: list[int] = field(default_factory=list)
    """The number of writes before each time that autograd saved the storage."""

    @property
    def bytes(self) -> int:
        """Return the bytes of the storage."""
        return self.weak.bytes

    @property
    def is_read_last(self) -> bool:
        """Return whether all that read or save the storage see the last content."""
        return {self.writes}.issuperset((*(writes for _, writes in self.reads), *self.saves))


class SeenStorages:
    """Storages by identity."""

    def __init__(self, unit: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        self._seen: dict[int, SeenStorage] = {}
        for module in unit.modules():
            for held in registered(module):
                for tensor in held.values():
                    if tensor is not None and tensor.layout is torch.strided:
                        seen = self.of(tensor)
                        seen.is_watched = seen.is_registered = True
        self._parameters = set(unit.parameters())
        slots = 0
        for tensor in inputs:
            seen = self.of(tensor)
            if seen.group is None and not seen.is_registered:
                seen.group, seen.slot, slots = 0, slots, slots + 1

    def of(self, tensor: torch.Tensor) -> SeenStorage:
        """Return the storage of a tensor. One that was never seen is not of the unit."""
        found = self.known(tensor)
        if found is None:
            found = SeenStorage(WeakStorage(tensor))
            self._seen[found.weak.identity] = found
            found.is_watched = self._is_cast(tensor)
        return found

    def known(self, tensor: torch.Tensor) -> SeenStorage | None:
        """Return the storage of a tensor; None before the first sight."""
        return self._seen.get(storage_identity(tensor))

    def made(self) -> list[SeenStorage]:
        """Return the storages that ops of the unit made, in order."""
        return [seen for seen in self._seen.values() if seen.group]

    def outside(self) -> list[SeenStorage]:
        """Return the storages that the unit did not make."""
        return [seen for seen in self._seen.values() if seen.group is None]

    def live_bytes(self) -> int:
        """Return the bytes of the storages that the unit made and that still exist."""
        return sum(seen.bytes for seen in self.made() if not seen.weak.is_expired())

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a cast of an own parameter that autocast made before and kept."""
        node = tensor.grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return False
        source = node.next_functions[0][0]
        return getattr(source, "variable", None) in self._parameters
