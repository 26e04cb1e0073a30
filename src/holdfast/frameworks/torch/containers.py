"""Containers taken apart into neutral values and put together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch

from holdfast.errors import InvalidError
from holdfast.frameworks.torch.tensors import dtype_name, require_storable, torch_dtype
from holdfast.spec.values import FrameworkValue, Value

OnTensor = Callable[[str, torch.Tensor], Value]
_DEPTH_MAX = 100


def take_apart(value: object, path: str, on_tensor: OnTensor, depth: int = 0) -> Value:
    """Return a value with every torch object in it replaced by a neutral one.

    Args:
        value: Any value; containers are copied, other leaves pass unchanged (their encoder judges them).
        path: Dotted name of the value.
        on_tensor: Called with path and tensor for each tensor; what it returns stands in its place.
    Raises:
        InvalidError: Nested beyond reason, which a container that holds itself is.
    """
    if depth > _DEPTH_MAX:
        raise InvalidError(f"{path[:200]}…: containers nested deeper than {_DEPTH_MAX}; a container may hold itself")
    if isinstance(value, torch.Tensor):
        return on_tensor(path, value)
    if isinstance(value, torch.dtype):
        return FrameworkValue("torch.dtype", dtype_name(value))
    if isinstance(value, torch.Size):
        return FrameworkValue("torch.size", tuple(value))
    if isinstance(value, torch.device):
        return FrameworkValue("torch.device", str(value))
    if type(value) is dict or type(value) is OrderedDict:
        items = ((key, take_apart(each, f"{path}.{key}", on_tensor, depth + 1)) for key, each in value.items())
        return _like(value, items)
    if type(value) is list or type(value) is tuple:
        parts = (take_apart(each, f"{path}.{number}", on_tensor, depth + 1) for number, each in enumerate(value))
        return type(value)(parts)
    return value


def put_together(value: Value, on_leaf: Callable[[Value], object]) -> object:
    """Return a neutral value with its torch objects back in place; the inverse of `take_apart`.

    Args:
        value: A neutral value.
        on_leaf: Called for every noun that stands for something else (`TensorRef`, `Skipped`); returns it.
    """
    if isinstance(value, FrameworkValue):
        return _built(value)
    if type(value) is dict or type(value) is OrderedDict:
        return _like(value, ((key, put_together(each, on_leaf)) for key, each in value.items()))
    if type(value) is list or type(value) is tuple:
        return type(value)(put_together(each, on_leaf) for each in value)
    return on_leaf(value)


def holds_tensor(value: object, depth: int = 0) -> bool:
    """Return whether a tensor lies anywhere in a value."""
    if isinstance(value, torch.Tensor):
        return True
    if depth > _DEPTH_MAX:
        return False
    if isinstance(value, dict):
        return any(holds_tensor(each, depth + 1) for each in value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensor(each, depth + 1) for each in value)
    return False


def small_tensor(path: str, tensor: torch.Tensor, numel_max: int = 1024) -> FrameworkValue:
    """Return a tensor of a few elements as a value: a learning rate kept as a tensor, a random state.

    Raises:
        InvalidError: It has over `numel_max` elements or cannot be stored.
    """
    require_storable(tensor, path)
    if tensor.numel() > numel_max:
        raise InvalidError(
            f"{path}: a tensor of {tensor.numel()} elements as a value; expected at most {numel_max}. "
            "Let it stand in the state as a tensor"
        )
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return FrameworkValue(
        "torch.tensor", {"dtype": dtype_name(tensor.dtype), "shape": tuple(tensor.shape), "data": data}
    )


def _like(value: dict[object, object], items: Iterable[tuple[object, object]]) -> dict[object, object]:
    """Return a dict of the same type; a module's state dict keeps the versions it carries as `_metadata`."""
    copy = type(value)(items)
    if isinstance(copy, OrderedDict) and hasattr(value, "_metadata"):
        copy._metadata = value._metadata  # type: ignore[attr-defined]
    return copy


def _built(value: FrameworkValue) -> object:
    content = value.value
    if value.kind == "torch.dtype" and isinstance(content, str):
        return torch_dtype(content)
    if value.kind == "torch.size" and isinstance(content, tuple):
        return torch.Size(content)
    if value.kind == "torch.device" and isinstance(content, str):
        return torch.device(content)
    if value.kind == "torch.tensor" and isinstance(content, dict):
        data = torch.frombuffer(bytearray(content["data"]), dtype=torch_dtype(content["dtype"]))
        return data.reshape(content["shape"])
    raise InvalidError(f"a value of kind {value.kind!r} was saved by a newer Holdfast; load it with that version")
