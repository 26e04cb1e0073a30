"""Tied tensors: names of the state that are the same elements of the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import DENSE, LocalShards
from holdfast.backends.torch.private_layout import local_shards_of, local_tensor, storage_identity
from holdfast.base.geometry.sharded import Sharded
from holdfast.errors import InvalidError

_Named = tuple[str, LocalShards, Sequence[torch.Tensor]]
"""A name, the part that this rank holds under it, and the tensors of the state with that memory."""


_OFFSETS_MAX = 1 << 40
"""Bound of the offset in a storage, which torch gives as the address of a view if the storage was freed."""


class Ties:
    """Finds the names of a state that are the same elements of the same memory."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[torch.Tensor, _Named]] = {}
        """First tensor at each address."""
        self._first: dict[tuple[object, ...], _Named] = {}

    def first_name(
        self,
        fqn: str,
        tensor: torch.Tensor,
        held: LocalShards,
        memory: Sequence[torch.Tensor],
        declared: Sharded | None = None,
    ) -> str:
        """Return the first name of these elements; `fqn` if no earlier name has them.

        Args:
            fqn: Name of the tensor.
            tensor: The tensor. Without elements it is tied to no other, unless it is declared.
            held: The part that this rank holds.
            memory: The tensors of the state with that memory.
            declared: Its declaration, or None. With a declaration, a tensor without elements is tied too, so that all
                ranks list the same name.
        Raises:
            InvalidError: The tensor has elements and no memory, or both names have one memory and different layouts.
        """
        named = (fqn, held, memory)
        if held.is_located and held.parts:
            # Several names may view one buffer, each with boxes of its own in it.
            key = (*_layout_key(held, memory), *(storage_key(part.local) for part in held.parts))
            return self._first.setdefault(key, named)[0]
        # A plain tensor's shape is in `held`. To ask torch for it again makes a new object for each of 100,000 tensors.
        if 0 not in (held.global_shape if held.holders is None else tensor.shape):
            first, first_held, first_memory = self._first_in_memory(tensor, named)
        elif declared is None and not held.is_located:
            return fqn
        else:
            first, first_held, first_memory = self._first.setdefault((id(tensor),), named)
        if first != fqn and _layout_key(held, memory) != _layout_key(first_held, first_memory):
            raise InvalidError(
                f"{fqn}: shares its memory with {first}, but the two declare different parts; expected the same "
                "layout. Correct one of them, or leave one out with skip="
            )
        return first

    def are_apart(self, held: Mapping[str, int]) -> bool:
        """Return whether it is certain that no two tensors share memory; each has one part without gaps.

        Args:
            held: Bytes of each name that is the first of its memory, in the order of calls.
        """
        if len(self._at) != len(held) or self._first:
            return False
        starts, extents = np.array([*self._at], dtype=np.int64), np.array([*held.values()], dtype=np.int64)
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        return bool((starts[:-1] + extents[order][:-1] <= starts[1:]).all())

    def _first_in_memory(self, tensor: torch.Tensor, named: _Named) -> _Named:
        local = tensor
        if type(tensor) not in DENSE:
            if local_shards_of(tensor) is not None:
                return self._first.setdefault(storage_key(tensor), named)
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        # The fast path: no other tensor starts at this address. The kept tensor keeps the address from being reused.
        address = local.data_ptr()
        if address < _OFFSETS_MAX and local.numel() and not (address and local.untyped_storage().data_ptr()):
            raise InvalidError(
                f"{named[0]}: has the shape {list(local.shape)} and no memory: its storage was freed, or it is a view "
                "of zeros that were never allocated. Allocate its memory first, or leave it out with skip="
            )
        first, first_named = self._at.setdefault(address, (tensor, named))
        if first is tensor:
            return first_named
        self._first.setdefault(storage_key(first), first_named)
        return self._first.setdefault(storage_key(tensor), named)


def _layout_key(held: LocalShards, memory: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return shape, regions and further memory, which two names of one memory must share.

    `Ties` has compared the first tensor's memory.
    """
    return (held.global_shape, *(part.region for part in held.parts), *map(storage_key, memory[1:]))


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly if they are the same elements of the same memory."""
    if local_shards_of(tensor) is not None:
        return (id(tensor),)
    local = tensor
    layout: tuple[object, ...] = ()
    if isinstance(tensor, DTensor):
        local, layout = local_tensor(tensor), (tensor.shape, *map(str, tensor.placements))
    return (
        storage_identity(local),
        local.storage_offset(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
        *local.shape,
        *local.stride(),
        *layout,
    )
