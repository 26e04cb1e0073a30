"""Converts unpickled values to the closed set of values that a checkpoint stores (docs/values.md)."""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.backends.foreign.pickles.objects import GlobalName, OpaqueObject
from holdfast.backends.foreign.pickles.tensors import StoredTensor
from holdfast.base.types.values import FrameworkValue, Group, Skipped, TensorRef, Value
from holdfast.errors import InvalidError, first_three

OnTensor = Callable[[str, StoredTensor], Value]
"""Called with path and tensor for each tensor in a value; returns its replacement."""

REMARKS_MAX = 100
"""Largest number of remarks about values that are left out."""

_PATH_CHARACTERS_MAX = 4096
"""Longest dotted name of a container: it is a prefix of the names of all values inside."""

_LEAVES = (
    str, int, float, bool, type(None), complex, bytes, bytearray, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, pathlib.PurePath, np.ndarray, np.generic, FrameworkValue, Group, Skipped, TensorRef,
)  # fmt: skip
_ARGUMENTS = "argparse.Namespace"
_KEYS = (str, int, float, bool, type(None))


def to_value(value: object, path: str, on_tensor: OnTensor, remarks: list[str]) -> Value:
    """Return an unpickled value as a value that a checkpoint can store.

    An object of an unknown class is left out: `Skipped` replaces it, and a remark names its path and class.

    Args:
        value: The value that `unpickled` returned, or a part of it, so its depth is bounded.
        path: Dotted name of the value.
        on_tensor: Returns the replacement of a tensor.
        remarks: Receives a remark for each value that is left out.
    """
    if isinstance(value, StoredTensor):
        return on_tensor(path, value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "V":
        return _left_out(value, path, remarks)
    if isinstance(value, dict | list | tuple):
        require_short(path)
    if isinstance(value, dict):
        return _dict(value, path, on_tensor, remarks)
    if isinstance(value, list | tuple):
        items = [to_value(item, f"{path}.{number}", on_tensor, remarks) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return _set(value, path, remarks)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, OpaqueObject) and value.qualname == _ARGUMENTS and isinstance(value.state, dict):
        # Inside an optimizer a dict would take the place of the object that the program knows.
        return _left_out(value, path, remarks) if "." in path else _arguments(value.state, path, on_tensor, remarks)
    return _left_out(value, path, remarks)


def require_short(path: str) -> None:
    """Refuse a container whose dotted name is too long.

    Raises:
        InvalidError: The message shows the start of the name.
    """
    if len(path) > _PATH_CHARACTERS_MAX:
        raise InvalidError(
            f"{path[:200]}…: a name of {len(path)} characters; expected {_PATH_CHARACTERS_MAX} at most. "
            "Shorten the keys of the state, or nest it less"
        )


def below(path: str, key: object) -> str:
    """Return the dotted name of the value under a key of a dict."""
    name = key if isinstance(key, str) else repr(key)
    return f"{path}.{name}" if path else name


def tensor_holders(value: object) -> set[int]:
    """Return the `id` of every container in a value that contains a tensor. Opaque objects are not searched."""
    known: dict[int, bool] = {}

    def holds_tensor(part: object) -> bool:
        if not isinstance(part, dict | list | tuple):
            return isinstance(part, StoredTensor)
        if id(part) not in known:
            items = part.values() if isinstance(part, dict) else part
            holds = [holds_tensor(item) for item in items]  # All of them: every container must be visited.
            known[id(part)] = any(holds)
        return known[id(part)]

    holds_tensor(value)
    return {identity for identity, is_holder in known.items() if is_holder}


def _dict(value: dict[Any, object], path: str, on_tensor: OnTensor, remarks: list[str]) -> Value:
    kept: dict[Any, Value] = OrderedDict() if isinstance(value, OrderedDict) else {}
    for key, item in value.items():
        if is_key(key):
            kept[key] = to_value(item, below(path, key), on_tensor, remarks)
        else:
            remark(remarks, f"{path}: an entry is left out: its key is a {type(key).__name__}, not text or a number")
    is_counter = isinstance(value, Counter) and all(type(count) is int for count in kept.values())
    return Counter(kept) if is_counter else kept


def _arguments(attributes: dict[Any, object], path: str, on_tensor: OnTensor, remarks: list[str]) -> Value:
    """Return the plain attributes of parsed arguments, in which Megatron-core keeps the sizes of a model."""
    left_out: list[str] = []
    kept = {name: to_value(each, below(path, name), on_tensor, left_out) for name, each in attributes.items()}
    plain = {name: each for name, each in kept.items() if not isinstance(each, Skipped)}
    if others := sorted(str(name) for name in kept.keys() - plain.keys()):
        remark(remarks, f"{path}: {first_three(others)} left out; expected attributes that are plain values")
    return plain


def is_key(key: object) -> bool:
    """Return whether a stored dict may have this key."""
    return type(key) in _KEYS or (type(key) is tuple and all(map(is_key, key)))


def _set(value: set[Any] | frozenset[Any], path: str, remarks: list[str]) -> Value:
    kept = []
    for member in value:
        if is_key(member) or (isinstance(member, _LEAVES) and not isinstance(member, np.ndarray)):
            kept.append(member)
        else:
            _left_out(member, path, remarks)
    return type(value)(kept)


def _left_out(value: object, path: str, remarks: list[str]) -> Skipped:
    if len(remarks) > REMARKS_MAX:
        return Skipped("")  # No remark will name it. Millions of names would only take memory.
    name = value.qualname if isinstance(value, OpaqueObject | GlobalName) else f"{type(value).__name__} of another type"
    count = _tensors_of(value) if isinstance(value, OpaqueObject) else 0
    what = f"{name}, with {count} tensors in it" if count else name
    remark(remarks, f"{path}: left out; it is a {what}. Save it as plain values to make it readable")
    return Skipped(path)


def _tensors_of(instance: OpaqueObject) -> int:
    """Return the number of tensors in an object, without those of objects inside it."""
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
    """Add a remark, unless the list is full."""
    if len(remarks) <= REMARKS_MAX:
        remarks.append(text if len(remarks) < REMARKS_MAX else "Further remarks of this kind are left out")
