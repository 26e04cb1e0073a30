"""The signature of a call: two calls of equal signature run the same ops on tensors of the same geometry."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.activations.runtime.arguments import is_data, mapped

Signature = tuple[Hashable, ...]


def signature_of(unit: nn.Module, form: Any, tensors: Sequence[torch.Tensor]) -> Signature:
    """Return the signature of a call of a unit.

    Args:
        unit: The module that is called.
        form: The arguments without tensors.
        tensors: The tensors of the arguments.
    """
    return (
        _key_of(form),
        tuple(
            (type(each), each.shape, _strides_of(each), each.dtype, each.device, each.requires_grad) for each in tensors
        ),
        scalars_of(unit),
        tuple(parameter.requires_grad for parameter in unit.parameters()),
        tuple(_autocast_of(device) for device in sorted({"cpu", *(each.device.type for each in tensors)})),
    )


def scalars_of(unit: nn.Module) -> tuple[Hashable, ...]:
    """Return the numbers, flags and texts that the modules of a unit hold, such as `training`: code may read them."""
    return tuple(
        (key, type(value), repr(value))
        for module in unit.modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not key.startswith("_")
    )


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None


def has_autocast(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether autocast is enabled for a device of the tensors."""
    return any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors)


def _autocast_of(device: str) -> tuple[object, ...]:
    if device not in ("cpu", "cuda"):
        return (device,)
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _key_of(form: Any) -> str:
    """Return a form as a key of a dict. An object counts by its type alone: a plan never runs such a unit again."""
    # A slice has no hash before Python 3.12; True equals 1, and NaN equals nothing.
    return repr(mapped(form, lambda each: (type(each), repr(each) if is_data(each) else "object")))
