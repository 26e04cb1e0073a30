"""Arguments and results of calls, taken apart into tensors and a form that joins the tensors again."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any

import torch

_DATA = (
    *(NoneType, bool, int, float, complex, str, bytes, slice, EllipsisType, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a form: a nested value without tensors."""

    number: int
    """Number of the tensor."""


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a nested value with other leaves. Tuples, lists and dicts are new; an instance of a subclass is a leaf."""
    kind = type(value)
    if kind is dict:
        return {key: mapped(each, leaf) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind(mapped(each, leaf) for each in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(mapped(each, leaf) for each in value))
    return leaf(value)


def take_apart(value: object, tensors: list[torch.Tensor]) -> Any:
    """Return the form of a nested value, and add the value's tensors to a list."""

    def leaf(each: object) -> object:
        if not isinstance(each, torch.Tensor):
            return each
        tensors.append(each)
        return TensorPlace(len(tensors) - 1)

    return mapped(value, leaf)


def put_together(form: Any, tensors: Sequence[Any]) -> Any:
    """Return the value of a form. Lists and dicts are new, so that a call cannot change those of another call."""
    return mapped(form, lambda each: tensors[each.number] if type(each) is TensorPlace else each)


def is_data(leaf: object) -> bool:
    """Return whether a leaf of a form is a tensor or a plain value, and no object such as a key-value cache."""
    return isinstance(leaf, (TensorPlace, *_DATA))


def objects_of(form: Any, place: str = "") -> list[str]:
    """Return the places of leaves that are no data."""
    if isinstance(form, dict):
        return [found for key, each in form.items() for found in objects_of(each, str(key))]
    if isinstance(form, (list, tuple)) and not isinstance(form, torch.Size):
        parts = enumerate(form)
        return [found for number, each in parts for found in objects_of(each, place or f"argument {number}")]
    return [] if is_data(form) else [f"{place} ({type(form).__name__})"]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [found for each in value for found in tensors_of(each)]
