"""Takes a tensor subclass apart: the inner tensors, each with its name and layout, and a record of the class.

An inner tensor has the name of the tensor and its attribute, as in `model.weight.scale`. The record is a plain value of
the state, in the place of the tensor. Nothing in it is ever imported or run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import DENSE, Ranks, coordinates_of
from holdfast.backends.torch.private_layout import local_tensor
from holdfast.backends.torch.subclasses.context import described, qualified
from holdfast.backends.torch.subclasses.known import known_class
from holdfast.backends.torch.subclasses.split import Split, split_of
from holdfast.backends.torch.tensors import dtype_name
from holdfast.base.geometry.sharded import Sharded
from holdfast.base.types.values import SUBCLASS, FrameworkValue, TensorRef, Value, is_subclass_record
from holdfast.errors import InvalidError

_DEPTH_MAX = 8


@dataclass(frozen=True, slots=True)
class Inner:
    """One inner tensor."""

    name: str
    """Dotted name, below that of the tensor."""

    tensor: torch.Tensor
    """The tensor, or a view of it."""

    declared: Sharded | None
    """The part of the whole that it is; None if the tensor is not split."""


@dataclass(frozen=True, slots=True)
class Flattened:
    """A tensor subclass, taken apart."""

    record: FrameworkValue
    """What stands in its place in the tree of values."""

    inner: list[Inner]
    """Its inner tensors, those of inner subclasses included."""


def is_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or a DTensor's local tensor, keeps its elements in inner tensors.

    torch's own such classes are not meant: they are refused as before (nested and sparse tensors), or last for a moment
    only (results of collectives under way).
    """
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return type(local) not in DENSE and _is_flattened(local)


def _is_flattened(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    if kind in DENSE or kind.__module__.partition(".")[0] == "torch":
        return False
    return all(callable(getattr(kind, name, None)) for name in ("__tensor_flatten__", "__tensor_unflatten__"))


def flattened(fqn: str, tensor: torch.Tensor, declared: Sharded | None, ranks: Ranks) -> Flattened:
    """Take a tensor subclass apart.

    Args:
        fqn: Name of the tensor.
        tensor: The tensor, or a DTensor of it.
        declared: Its declared layout, which is refused.
        ranks: This rank and the others.
    Raises:
        InvalidError: It cannot be saved; the message names it and its class.
    """
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if declared is not None or coordinates_of(tensor, fqn) is not None:
        raise InvalidError(
            f"{fqn}: {type(local).__name__} is a tensor subclass, of which a part is declared; expected all of it, or "
            "a DTensor. Pass its inner tensors as Sharded, or leave it out with skip="
        )
    known = known_class(type(local))
    if known is not None and not known.rules.keys() >= {*inner_names(local, fqn)[0]}:
        known = None  # Another version of the class, with inner tensors that are not known.
    split = split_of(fqn, tensor, local, known, ranks) if isinstance(tensor, DTensor) else None
    inner: list[Inner] = []
    fields = _record(fqn, "", local, split, inner)
    fields["shape"] = tuple(tensor.shape)
    if split is not None and split.grid is not None:
        fields["grid"] = split.grid
    return Flattened(FrameworkValue(SUBCLASS, fields), inner)


def inner_names(local: torch.Tensor, fqn: str) -> tuple[list[str], object]:
    """Return the names of a subclass's inner tensors, without those that follow from others, and its context.

    Raises:
        InvalidError: It does not say them.
    """
    flatten: Any = getattr(local, "__tensor_flatten__")  # noqa: B009 - torch declares it for no class
    try:
        names, context = flatten()
    except Exception as error:
        raise InvalidError(
            f"{fqn}: __tensor_flatten__ of tensor subclass {qualified(type(local))} raised {type(error).__name__}: "
            f"{str(error)[:200]}; convert it, or leave it out with skip="
        ) from error
    known = known_class(type(local))
    kept = [name for name in names if known is None or name not in known.caches]
    for name in kept:
        if (
            not isinstance(name, str)
            or not name
            or "." in name
            or not isinstance(getattr(local, name, None), torch.Tensor)
        ):
            raise InvalidError(
                f"{fqn}: tensor subclass {qualified(type(local))} names an inner tensor {name!r}, which it has not; "
                "convert it, or leave it out with skip="
            )
    return kept, context


def _record(
    fqn: str, prefix: str, local: torch.Tensor, split: Split | None, inner: list[Inner], depth: int = 0
) -> dict[str, Value]:
    """Return the fields of a record; append the inner tensors."""
    if depth > _DEPTH_MAX:
        raise InvalidError(f"{fqn}: tensor subclasses nested deeper than {_DEPTH_MAX}; leave it out with skip=")
    names, context = inner_names(local, fqn)
    known = known_class(type(local)) if not depth else None
    tensors: dict[str, Value] = {}
    for name in names:
        tensor, path = getattr(local, name), f"{prefix}{name}"
        if _is_flattened(tensor):
            tensors[name] = FrameworkValue(SUBCLASS, _record(fqn, f"{path}.", tensor, split, inner, depth + 1))
            continue
        if isinstance(tensor, DTensor) and (split is not None or is_subclass(tensor)):
            raise InvalidError(
                f"{fqn}.{path}: a DTensor inside a tensor subclass that is itself split, or around another one; "
                "expected plain tensors there. Leave it out with skip="
            )
        if not _is_kept(local, name, tensor):
            raise InvalidError(
                f"{fqn}.{path}: {qualified(type(local))} makes this inner tensor anew each time it is asked, so a load "
                "could not fill it; expected an attribute. Convert it, or leave it out with skip="
            )
        tensor = tensor.detach()
        part = None if split is None else split.part(f"{fqn}.{path}", name, tensor)
        inner.append(Inner(path, tensor if part is None else _tensor_of(part), part))
        tensors[name] = TensorRef(f"{fqn}.{path}")
    return {
        "class": qualified(type(local)),
        "dtype": dtype_name(local.dtype),
        "context": described(context, fqn, tuple(local.shape) if known is not None else None),
        "tensors": tensors,
    }


def _is_kept(local: torch.Tensor, name: str, tensor: torch.Tensor) -> bool:
    """Return whether an inner tensor is one that the subclass keeps, or a view of it."""
    again = getattr(local, name)
    return again is tensor or type(again) not in DENSE or again.data_ptr() == tensor.data_ptr()


def _tensor_of(part: Sharded) -> torch.Tensor:
    assert isinstance(part.tensor, torch.Tensor), "a part of an inner tensor is one tensor"
    return part.tensor


def references_of(record: FrameworkValue) -> Iterator[tuple[str, str]]:
    """Yield dotted name and FQN of each inner tensor that a record states, as far as it is well formed."""
    fields = record.value if isinstance(record.value, dict) else {}
    tensors = fields.get("tensors")
    for name, value in tensors.items() if isinstance(tensors, dict) else ():
        if isinstance(value, TensorRef):
            yield str(name), value.fqn
        elif is_subclass_record(value):
            yield from ((f"{name}.{inner}", fqn) for inner, fqn in references_of(value))


def renamed(record: FrameworkValue, fqn: str) -> FrameworkValue:
    """Return a record whose inner tensors have their names below another name."""
    fields = record.value if isinstance(record.value, dict) else {}
    tensors = fields.get("tensors")
    inner: dict[object, Value] = {}
    for name, value in tensors.items() if isinstance(tensors, dict) else ():
        path = f"{fqn}.{name}"
        inner[name] = renamed(value, path) if is_subclass_record(value) else TensorRef(path)
    return FrameworkValue(SUBCLASS, {**fields, "tensors": inner})
