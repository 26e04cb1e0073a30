"""Copies a state into host memory that the caller lends, so that training may change the state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import is_meta, is_ordinary, local_of
from holdfast.backends.torch.private_layout import dtensor_on_host
from holdfast.backends.torch.side_stream import side_stream
from holdfast.base.ports.framework import Pin

_ALIGNMENT_BYTES = 64
"""Alignment of each copy: of any element, and of a line of the processor's cache."""


def staged_copy(
    state: Mapping[str, object], lend: Callable[[int, Pin | None], memoryview], make: type[dict[str, object]] = dict
) -> dict[str, object]:
    """Return a copy of a state in host memory: the same containers, DTensors on the same meshes, deep copies of values.

    Args:
        state: The state, of dicts, lists and tuples.
        lend: Returns memory of so many bytes at least; page-locked by `pin`, if a device copies into it.
        make: Class of the copy of the outermost dict.
    """
    copying = _Copying()
    copying.look(state)
    copying.copy_all(lend)
    return make((key, copying.copied(value)) for key, value in state.items())


class _Copying:
    """The copies of one state: first all tensors are found, then copied, then put into copies of the containers."""

    def __init__(self) -> None:
        self._found: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def look(self, value: object) -> None:
        """Find the tensors of a value."""
        if isinstance(value, torch.Tensor):
            if is_ordinary(value):
                self._found.setdefault(id(value), value)
        elif isinstance(value, Mapping):
            for item in value.values():
                self.look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.look(item)

    @torch.no_grad()
    def copy_all(self, lend: Callable[[int, Pin | None], memoryview]) -> None:
        """Copy all tensors that were found into lent memory; return once the copies are complete."""
        places: list[tuple[int, torch.Tensor, int]] = []
        at = 0
        for identity, tensor in self._found.items():
            local = local_of(tensor)
            places.append((identity, local, at))
            at += -(-local.numel() * local.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        devices = dict.fromkeys(local.device for _, local, _ in places if local.is_cuda)
        memory = lend(at, side_stream(next(iter(devices))).pin if devices else None)
        for identity, local, start in places:
            into = _view(memory, start, local)
            into.copy_(local, non_blocking=True)
            tensor = self._found[identity]
            self._copies[identity] = dtensor_on_host(into, tensor) if isinstance(tensor, DTensor) else into
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def copied(self, value: object) -> object:
        """Return the copy of a value."""
        if isinstance(value, torch.Tensor):
            known = self._copies.get(id(value))
            return _other_copy(value) if known is None else known
        if isinstance(value, Mapping):
            items = ((key, self.copied(item)) for key, item in value.items())
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        if type(value) is list or type(value) is tuple:
            return type(value)(self.copied(item) for item in value)
        return copy.deepcopy(value)


def _view(memory: memoryview, start: int, local: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of memory, of the dtype and shape of another tensor."""
    count = local.numel() * local.itemsize
    if not count:
        return torch.empty(local.shape, dtype=local.dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start).view(local.dtype).view(local.shape)


def _other_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor without one dense memory: sharded by FSDP1, or of a class that the save refuses."""
    if is_meta(tensor):
        return tensor
    on_host = tensor.cpu()
    return tensor.detach().clone() if on_host is tensor else on_host
