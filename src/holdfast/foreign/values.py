"""What a pickle held besides tensors, as the closed set of values that a checkpoint keeps (docs/values.md)."""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.errors import InvalidError
from holdfast.foreign.pickles.objects import DTypeRef, GlobalName, OpaqueObject
from holdfast.foreign.pickles.tensors import StoredTensor
from holdfast.types.values import FrameworkValue, Group, Skipped, TensorRef, Value

OnTensor = Callable[[str, StoredTensor], Value]
"""Called with path and tensor for each tensor in a value; what it returns stands in its place."""

REMARKS_MAX = 100
"""Values that are told of one by one where they are left out."""

_PATH_CHARACTERS_MAX = 4096
"""Of a container's dotted name, which the name of everything in it begins with."""

_LEAVES = (
    str, int, float, bool, type(None), complex, bytes, bytearray, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, pathlib.PurePath, np.ndarray, np.generic, FrameworkValue, Group, Skipped, TensorRef,
)  # fmt: skip
_KEYS = (str, int, float, bool, type(None))


def to_value(value: object, path: str, on_tensor: OnTensor, remarks: list[str]) -> Value:
    """Return a value of a pickle as one that can be kept.

    An object of a class we do not have is left out: `Skipped` stands in its place, and a remark names path and class.

    Args:
        value: What `unpickled` returned, or a part of it; so it is nested within reason.
        path: Its dotted name.
        on_tensor: Says what stands for a tensor.
        remarks: Where it is told what was left out.
    """
    if isinstance(value, StoredTensor):
        return on_tensor(path, value)
    if isinstance(value, DTypeRef):
        return FrameworkValue("torch.dtype", value.name)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "V":
        return _left_out(value, path, remarks)
    if isinstance(value, dict | list | tuple):
        require_short(path)
    if isinstance(value, dict):
        return _dict(value, path, on_tensor, remarks)
    if isinstance(value, list):
        return [to_value(each, f"{path}.{number}", on_tensor, remarks) for number, each in enumerate(value)]
    if isinstance(value, tuple):
        return tuple([to_value(each, f"{path}.{number}", on_tensor, remarks) for number, each in enumerate(value)])
    if isinstance(value, set | frozenset):
        return _set(value, path, remarks)
    if isinstance(value, _LEAVES):
        return value
    return _left_out(value, path, remarks)


def require_short(path: str) -> None:
    """Refuse to name what is in a container whose own name is beyond reason.

    Raises:
        InvalidError: It is; the message shows where it begins.
    """
    if len(path) > _PATH_CHARACTERS_MAX:
        raise InvalidError(
            f"{path[:200]}…: a name of {len(path)} characters; expected {_PATH_CHARACTERS_MAX} at most. "
            "Shorten the keys of the state, or nest it less"
        )


def below(path: str, key: object) -> str:
    """Return the name of what stands under a key of a dict."""
    name = key if isinstance(key, str) else repr(key)
    return f"{path}.{name}" if path else name


def tensor_holders(value: object) -> set[int]:
    """Return the identities of all containers in a value that lead to a tensor, objects left out set aside."""
    known: dict[int, bool] = {}

    def leads(each: object) -> bool:
        if not isinstance(each, dict | list | tuple):
            return isinstance(each, StoredTensor)
        if id(each) not in known:
            items = each.values() if isinstance(each, dict) else each
            found = [leads(item) for item in items]  # Of all, also behind the first: each is to be known.
            known[id(each)] = any(found)
        return known[id(each)]

    leads(value)
    return {identity for identity, does in known.items() if does}


def _dict(value: dict[Any, object], path: str, on_tensor: OnTensor, remarks: list[str]) -> Value:
    kept: dict[Any, Value] = OrderedDict() if isinstance(value, OrderedDict) else {}
    for key, each in value.items():
        if is_key(key):
            kept[key] = to_value(each, below(path, key), on_tensor, remarks)
        else:
            remark(remarks, f"{path}: an entry is left out: its key is a {type(key).__name__}, not text or a number")
    return Counter(kept) if isinstance(value, Counter) and _counts(kept) else kept


def _counts(kept: dict[Any, Value]) -> bool:
    return all(type(each) is int for each in kept.values())


def is_key(key: object) -> bool:
    """Return whether a dict that is kept may have a key."""
    return type(key) in _KEYS or (type(key) is tuple and all(map(is_key, key)))


def _set(value: set[Any] | frozenset[Any], path: str, remarks: list[str]) -> Value:
    kept = []
    for each in value:
        neutral = FrameworkValue("torch.dtype", each.name) if isinstance(each, DTypeRef) else each
        if is_key(neutral) or (isinstance(neutral, _LEAVES) and not isinstance(neutral, np.ndarray)):
            kept.append(neutral)
        else:
            _left_out(each, path, remarks)
    return type(value)(kept)


def _left_out(value: object, path: str, remarks: list[str]) -> Skipped:
    if len(remarks) > REMARKS_MAX:
        return Skipped("")  # Its name has been told of nowhere; of millions it would only take memory.
    name = value.qualname if isinstance(value, OpaqueObject | GlobalName) else f"{type(value).__name__} of another type"
    count = _tensors_of(value) if isinstance(value, OpaqueObject) else 0
    what = f"{name}, with {count} tensors in it" if count else name
    remark(remarks, f"{path}: left out; it is a {what}. Save it as plain values to have it read")
    return Skipped(path)


def _tensors_of(instance: OpaqueObject) -> int:
    """Return how many tensors an object holds, those of objects within it set aside."""
    waiting: list[object] = [instance.args, instance.state, instance.items]
    count = 0
    while waiting:
        value = waiting.pop()
        count += isinstance(value, StoredTensor)
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return count


def remark(remarks: list[str], text: str) -> None:
    """Take a remark, unless there are many already."""
    if len(remarks) < REMARKS_MAX:
        remarks.append(text)
    elif len(remarks) == REMARKS_MAX:
        remarks.append("Further remarks of this kind are left out")
