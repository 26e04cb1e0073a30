"""The context of a tensor subclass: what `__tensor_flatten__` returns beside the inner tensors, as plain values."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum

import torch

from holdfast.backends.torch.containers import plain_leaf, put_together, take_apart
from holdfast.base.types.values import FrameworkValue, Value
from holdfast.errors import InvalidError

OUTER = "torch.outer"
"""Kind of a value that follows from the tensor itself: its "device" or its "shape"."""

DESCRIBED = "torch.described"
"""Kind of an object that is only compared, never built: an enum member, a named tuple, a dataclass."""

_SCALARS = (bool, int, float, str, bytes, complex, type(None))
_DEPTH_MAX = 32


def qualified(kind: type) -> str:
    """Return module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def described(value: object, path: str, shape: tuple[int, ...] | None, depth: int = 0) -> Value:
    """Return a context as plain values.

    Args:
        value: The context, or a part of it.
        path: Name of the tensor, for the message.
        shape: Shape of this rank's tensor, if a tuple equal to it means just that; it may then be split anew.
        depth: How deep the part is.
    Raises:
        InvalidError: It holds a value of another type.
    """
    if isinstance(value, torch.device):
        return FrameworkValue(OUTER, "device")
    if shape is not None and isinstance(value, list | tuple) and tuple(value) == shape:
        return FrameworkValue(OUTER, "shape")
    if isinstance(value, Enum):
        return FrameworkValue(DESCRIBED, {"class": qualified(type(value)), "name": value.name})
    if isinstance(value, torch.layout | torch.memory_format):
        return FrameworkValue(DESCRIBED, {"class": qualified(type(value)), "name": str(value)})
    if type(value) in _SCALARS or isinstance(value, torch.dtype | torch.Size):
        return take_apart(value, path, _refuse_tensor)
    if depth < _DEPTH_MAX:
        if (entries := _fields_of(value)) is not None:
            parts = {name: described(entry, path, shape, depth + 1) for name, entry in entries.items()}
            return FrameworkValue(DESCRIBED, {"class": qualified(type(value)), "fields": parts})
        if type(value) is list or type(value) is tuple:
            return type(value)(described(item, path, shape, depth + 1) for item in value)
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: described(entry, path, shape, depth + 1) for key, entry in value.items()}
    raise InvalidError(
        f"{path}: the tensor subclass keeps a {qualified(type(value))} beside its inner tensors; expected plain "
        f"values, enums and dataclasses. Pass its inner tensors by name, or leave it out with skip=[{path!r}]"
    )


def built(value: Value, device: torch.device, shape: tuple[int, ...]) -> object:
    """Return the context that `described` described.

    Args:
        value: The described context.
        device: Device of the tensor.
        shape: Shape of this rank's tensor.
    Raises:
        InvalidError: It holds an object that is only described.
    """
    if isinstance(value, FrameworkValue) and value.kind == OUTER and value.value in ("device", "shape"):
        return device if value.value == "device" else torch.Size(shape)
    if isinstance(value, FrameworkValue) and value.kind == DESCRIBED:
        raise InvalidError("its context holds an object that is described and cannot be built")
    if isinstance(value, FrameworkValue):
        return put_together(value, plain_leaf)
    if type(value) is list or type(value) is tuple:
        return type(value)(built(item, device, shape) for item in value)
    if type(value) is dict:
        return {key: built(entry, device, shape) for key, entry in value.items()}
    return value


def is_built_from_values(value: Value) -> bool:
    """Return whether `built` can make a described context again."""
    if isinstance(value, FrameworkValue):
        return value.kind != DESCRIBED
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return all(map(is_built_from_values, items))


def _fields_of(value: object) -> dict[str, object] | None:
    """Return the fields of a dataclass or a named tuple; None for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    names = getattr(type(value), "__match_args__", None)  # A named tuple lists its fields there.
    if isinstance(value, tuple) and isinstance(names, tuple) and len(names) == len(value):
        return dict(zip(names, value, strict=True))
    return None


def _refuse_tensor(path: str, _: torch.Tensor) -> Value:
    raise InvalidError(
        f"{path}: the tensor subclass keeps a tensor in its context; expected it among its inner tensors"
    )
