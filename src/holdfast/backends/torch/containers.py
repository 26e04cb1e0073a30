"""Converts containers with torch objects to neutral values and back."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
import torch

from holdfast.backends.torch.local_shards import bytes_of
from holdfast.backends.torch.private_layout import copy_versions
from holdfast.backends.torch.tensors import dtype_name, require_storable, torch_dtype
from holdfast.base.geometry.dtype import DTYPES, NEWER_TYPES
from holdfast.base.types.values import SUBCLASS, FrameworkValue, Value
from holdfast.errors import CorruptError, InvalidError

OnTensor = Callable[[str, torch.Tensor], Value]
_DEPTH_MAX = 100

_PLAIN = {int, float, str, bool, type(None)}
"""Types of leaves that stay as they are."""


def take_apart(value: object, path: str, on_tensor: OnTensor, depth: int = 0) -> Value:
    """Return a value with neutral values in place of torch objects.

    Args:
        value: Any value. Containers are copied; other leaves stay as they are, and the encoder checks them later.
        path: Dotted name of the value.
        on_tensor: Called with path and tensor for each tensor; returns its substitute.
    Raises:
        InvalidError: Nested too deeply, as a container that contains itself is.
    """
    if depth > _DEPTH_MAX:
        raise InvalidError(
            f"{path[:200]}…: containers nested deeper than {_DEPTH_MAX}; it may contain itself, skip= it"
        )
    if isinstance(value, torch.Tensor):
        return on_tensor(path, value)
    if isinstance(value, torch.dtype):
        return FrameworkValue("torch.dtype", dtype_name(value))
    if isinstance(value, torch.Size):
        return FrameworkValue("torch.size", tuple(value))
    if isinstance(value, torch.device):
        return FrameworkValue("torch.device", str(value))
    if is_plain_dict(value):
        items = ((key, take_apart(entry, f"{path}.{key}", on_tensor, depth + 1)) for key, entry in value.items())
        return dict_like(value, items)
    if type(value) is list or type(value) is tuple:
        if {*map(type, value)} <= _PLAIN:  # The state of a random generator has hundreds of numbers.
            return type(value)(value)
        parts = (take_apart(item, f"{path}.{number}", on_tensor, depth + 1) for number, item in enumerate(value))
        return type(value)(parts)
    return value


def tensors_in(value: object, path: str) -> dict[str, object]:
    """Return every tensor in a value, by dotted name."""
    tensors: dict[str, object] = {}
    take_apart(value, path, tensors.setdefault)
    return tensors


def put_together(value: Value, on_leaf: Callable[[Value], object]) -> object:
    """Return a value with torch objects for its neutral values; the inverse of `take_apart`.

    Args:
        value: A neutral value.
        on_leaf: Called for every other leaf; returns the object that a `TensorRef`, a `Skipped` or the record of a
            tensor subclass refers to.
    """
    if isinstance(value, FrameworkValue):
        return on_leaf(value) if value.kind == SUBCLASS else _built(value)
    if is_plain_dict(value):
        return dict_like(value, ((key, put_together(entry, on_leaf)) for key, entry in value.items()))
    if type(value) is list or type(value) is tuple:
        return type(value)(put_together(item, on_leaf) for item in value)
    return on_leaf(value)


def plain_leaf(value: Value) -> object:
    """Return a leaf as it is, where no tensor can be: `on_leaf` of `put_together`.

    Raises:
        InvalidError: It is the record of a tensor subclass.
    """
    if isinstance(value, FrameworkValue):
        raise InvalidError("a tensor subclass where only plain values can be; expected a plain value, skip= it")
    return value


def is_plain_dict(value: object) -> TypeGuard[dict[Any, object]]:
    """Return whether a value is a dict of a type that Holdfast stores."""
    return type(value) is dict or type(value) is OrderedDict


def holds_tensor(value: object, depth: int = 0) -> bool:
    """Return whether a value contains a tensor at any depth."""
    if isinstance(value, torch.Tensor):
        return True
    if depth > _DEPTH_MAX:
        return False
    if isinstance(value, dict):
        return any(holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensor(item, depth + 1) for item in value)
    return False


def small_tensor(path: str, tensor: torch.Tensor, numel_max: int = 1024) -> FrameworkValue:
    """Return a tensor of a few elements as a value: a learning rate kept as a tensor, a random state.

    Raises:
        InvalidError: It has more than `numel_max` elements, or cannot be stored.
    """
    require_storable(tensor, path)
    if tensor.numel() > numel_max:
        raise InvalidError(
            f"{path}: a tensor of {tensor.numel()} elements as a value; expected at most {numel_max}. "
            "Put it into a dict of the state"
        )
    if (dtype := dtype_name(tensor.dtype)) in NEWER_TYPES:
        # Readers before format 1.5 would take it for damage: no manifest states the types of values.
        raise InvalidError(
            f"{path}: a tensor of {dtype} as a value; expected another type. Put it into a dict of the state"
        )
    data = bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()).tobytes()
    return FrameworkValue("torch.tensor", {"dtype": dtype, "shape": tuple(tensor.shape), "data": data})


def dict_like(value: dict[Any, object], items: Iterable[tuple[object, object]]) -> dict[Any, object]:
    """Return a dict of the same type. The copy of a module's state dict keeps the versions of its modules."""
    copy = type(value)(items)
    if isinstance(value, OrderedDict) and isinstance(copy, OrderedDict):
        copy_versions(value, copy)
    return copy


def _built(value: FrameworkValue) -> object:
    content = value.value
    if value.kind == "torch.dtype":
        return _dtype(content)
    if value.kind == "torch.size":
        return torch.Size(_shape(content))
    if value.kind == "torch.device" and isinstance(content, str):
        try:
            return torch.device(content)
        except RuntimeError as error:
            raise InvalidError(
                f"device {content[:80]!r}: unknown to this torch ({str(error)[:200]}); expected one that it knows. "
                "Load with the torch that it was saved with, or leave the name out with skip="
            ) from error
    if value.kind == "torch.tensor":
        return _tensor(content)
    raise InvalidError(f"a value of kind {value.kind[:80]!r} was saved by a newer Holdfast; load it with that version")


_DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Dtypes by name. A stored name is looked up here, never as an attribute of torch."""


def _dtype(name: object) -> torch.dtype:
    if not isinstance(name, str):
        raise CorruptError(f"a stored dtype is {type(name).__name__}; expected its name. Read another copy")
    if name not in _DTYPES:
        # Not damage: the bytes match their digest, so other copies hold the same name.
        raise InvalidError(
            f"dtype {name[:80]!r}: this torch has none of this name; expected one that it has. Load with the torch "
            "that it was saved with, or leave the name out with skip="
        )
    return _DTYPES[name]


def _shape(content: object) -> tuple[int, ...]:
    if not isinstance(content, tuple) or not all(type(length) is int and 0 <= length < 1 << 63 for length in content):
        raise CorruptError("a stored torch.Size is not a tuple of lengths; read another copy")
    return content


def _tensor(content: object) -> torch.Tensor:
    if not isinstance(content, dict) or content.keys() != {"dtype", "shape", "data"}:
        raise CorruptError("a stored small tensor lacks dtype, shape or data; read another copy")
    dtype, shape, data = _dtype(content["dtype"]), _shape(content["shape"]), content["data"]
    # Allocate only what the stored bytes fill. The padded size keeps strides within the integers of torch.
    padded_bytes = math.prod(length or 1 for length in shape) * dtype.itemsize
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data) or padded_bytes >= 1 << 62:
        raise CorruptError(
            f"a small tensor of {dtype} {list(shape)[:64]} whose data has another size; read another copy"
        )
    if len(shape) > _DIMENSIONS_MAX or dtype not in _STORABLE:
        raise CorruptError(f"a small tensor of {dtype} with {len(shape)} dimensions; read another copy")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


_DIMENSIONS_MAX = 64
_STORABLE = {_DTYPES[name] for name in DTYPES}


def tensor_of(array: object, dtype: str) -> torch.Tensor:
    """Return a tensor of a stored dtype from a numpy array that holds its bits."""
    assert isinstance(array, np.ndarray)
    bits = np.ascontiguousarray(array).reshape(array.shape)
    return torch.from_numpy(bits).view(torch_dtype(dtype))
