"""Arguments and results of calls, taken apart into tensors and a form that joins the tensors again."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

Form = tuple[Any, ...]
"""A nested value without tensors: a kind, and the kind's parts."""

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    slice,
    type(...),
    enum.Enum,
)


def take_apart(value: object, tensors: list[torch.Tensor]) -> Form:
    """Return the form of a nested value, and add the value's tensors to a list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    kind = type(value)
    if kind is dict:
        return ("dict", tuple((key, take_apart(each, tensors)) for key, each in value.items()))  # type: ignore[attr-defined]
    if kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return ("sequence", kind, tuple(take_apart(each, tensors) for each in value))  # type: ignore[attr-defined]
    return ("plain" if isinstance(value, (*_PLAIN, torch.Size)) else "object", value)


def put_together(form: Form, tensors: Sequence[Any]) -> Any:
    """Return the value of a form. Lists and dicts are new, so that a call cannot change those of another call."""
    if form[0] == "tensor":
        return tensors[form[1]]
    if form[0] == "dict":
        return {key: put_together(each, tensors) for key, each in form[1]}
    if form[0] == "sequence":
        parts = [put_together(each, tensors) for each in form[2]]
        return form[1](*parts) if hasattr(form[1], "_fields") else form[1](parts)
    return form[1]


def objects_of(form: Form, place: str = "") -> list[str]:
    """Return the places of values that are neither data nor containers of data, for example a key-value cache."""
    if form[0] == "object":
        return [f"{place} ({type(form[1]).__name__})"]
    if form[0] == "dict":
        return [found for key, each in form[1] for found in objects_of(each, str(key))]
    if form[0] == "sequence":
        return [
            found for number, each in enumerate(form[2]) for found in objects_of(each, place or f"argument {number}")
        ]
    return []


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dicts."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
