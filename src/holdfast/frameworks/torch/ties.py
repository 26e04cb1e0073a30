"""Tied tensors: names of the state that are the same elements of the same memory."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.held import Held, local_shards_of

_DENSE = (torch.Tensor, torch.nn.Parameter)
"""Tensor types that own plain memory."""


Note = TypeVar("Note")


class Ties(Generic[Note]):
    """Finds tensors that are the same elements of the same memory, and keeps a note for the first of each."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[torch.Tensor, Note]] = {}
        self._first: dict[tuple[object, ...], Note] = {}

    def first(self, tensor: torch.Tensor, note: Note, fqn: str) -> Note:
        """Return the note of the first tensor with these elements of this memory; `note` if this one is the first.

        Raises:
            InvalidError: The tensor has elements and no memory.
        """
        local = tensor
        if type(tensor) not in _DENSE:
            if local_shards_of(tensor) is not None:
                return self._first.setdefault(storage_key(tensor), note)
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # The fast path: no other tensor starts at this address. The kept tensor keeps the address from being reused.
        address = local.data_ptr()
        if not address and local.numel():
            raise InvalidError(
                f"{fqn}: has the shape {list(local.shape)} and no memory: its storage was freed, or it is a view of "
                "zeros that were never allocated. Allocate its memory first, or leave it out with skip="
            )
        first, first_note = self._at.setdefault(address, (tensor, note))
        if first is tensor:
            return first_note
        self._first.setdefault(storage_key(first), first_note)
        return self._first.setdefault(storage_key(tensor), note)


def has_elements(tensor: torch.Tensor, held: Held) -> bool:
    """Return whether a tensor has elements, so that it has an address."""
    # A plain tensor's shape is in `held`. To ask torch for it again makes a new object for each of 100,000 tensors.
    return 0 not in (held.global_shape if held.holders is None else tensor.shape)


def parts_key(held: Held) -> tuple[object, ...]:
    """Return shape and regions of a tensor: what two names of one memory must have in common."""
    return (held.global_shape, *(part.region for part in held.parts))


def different_parts(fqn: str, first: str) -> InvalidError:
    """Return the error for two names of one memory with different layouts."""
    return InvalidError(
        f"{fqn}: shares its memory with {first}, but the two declare different parts; expected the same layout. "
        "Correct one of them, or leave one out with skip="
    )


def storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share exactly if they are the same elements of the same memory."""
    if local_shards_of(tensor) is not None:
        return (id(tensor),)
    local = tensor
    layout: tuple[object, ...] = ()
    if isinstance(tensor, DTensor):
        local, layout = tensor._local_tensor, (tensor.shape, *map(str, tensor.placements))
    return (
        local.untyped_storage()._cdata,
        local.storage_offset(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
        *local.shape,
        *local.stride(),
        *layout,
    )
