"""Makes optimizer state of a subclass that the optimizer has not allocated yet.

A checkpoint names the class, and chooses nothing: a class counts only if the code of the optimizer has it at hand. It
is the class of the parameter itself, or a name in the module that defines the optimizer's class. Nothing is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.backends.torch.local_shards import dtensor_like
from holdfast.backends.torch.private_layout import local_tensor
from holdfast.backends.torch.subclasses.context import built, described, is_built_from_values, qualified
from holdfast.backends.torch.subclasses.fill import other_grid, text_of
from holdfast.backends.torch.subclasses.flatten import inner_names
from holdfast.backends.torch.subclasses.known import Rule, known_class
from holdfast.backends.torch.tensors import torch_dtype
from holdfast.base.geometry.tensor import TensorSpec
from holdfast.base.ports.framework import Catalog
from holdfast.base.types.values import FrameworkValue, TensorRef, Value, is_subclass_record
from holdfast.errors import CorruptError, InvalidError


def require_made_again(
    fqn: str, record: FrameworkValue, parameter: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Refuse to save state that a load into a fresh optimizer could not make.

    Raises:
        InvalidError: Names the class, and why.
    """
    fields = record.value
    assert isinstance(fields, dict), "a record made here is a dict"
    class_of(fqn, str(fields["class"]), parameter, optimizers)
    if not is_built_from_values(fields["context"]) or any(map(is_subclass_record, fields["tensors"].values())):
        raise InvalidError(
            f"{fqn}: a load could not make this {fields['class']} in a fresh optimizer: its context or its inner "
            "tensors hold other objects; expected plain values. Leave it out with skip="
        )


def class_of(
    fqn: str, name: str, parameter: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
) -> type[torch.Tensor]:
    """Return the class of a name, if the code of an optimizer has it at hand.

    Args:
        fqn: Name of the state, for the message.
        name: Module and name of the class.
        parameter: The parameter.
        optimizers: The optimizers that step it.
    Raises:
        InvalidError: None of them has it.
    """
    local = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    kinds = [type(optimizer) for optimizer in optimizers]
    for candidate in (type(local), *(each for kind in kinds for each in _at_hand(kind))):
        if qualified(candidate) == name and hasattr(candidate, "__tensor_unflatten__"):
            return candidate
    raise InvalidError(
        f"{fqn}: is a {name[:200]} in the checkpoint, which {'/'.join(sorted(kind.__name__ for kind in kinds))} does "
        "not make; expected an optimizer whose module defines or imports that class. Use the class of optimizer that "
        "was saved, or leave it out with skip="
    )


def _at_hand(kind: type[torch.optim.Optimizer]) -> Iterable[type[torch.Tensor]]:
    """Yield the tensor subclasses that the modules of an optimizer's classes name; torch's own are not meant."""
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if module is None or _is_of_torch(base) or base is object:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type) and issubclass(value, torch.Tensor) and not _is_of_torch(value):
                yield value


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def new_subclass(
    fqn: str,
    record: FrameworkValue,
    parameter: torch.Tensor,
    optimizers: Iterable[torch.optim.Optimizer],
    catalog: Catalog,
) -> torch.Tensor:
    """Return a tensor of a recorded subclass, in the layout of the parameter, with memory that is not filled yet.

    Raises:
        InvalidError: The optimizer does not make such a class, or it refuses what is recorded.
        CorruptError: The record is not one that a save writes.
    """
    fields = _checked_fields(fqn, record)
    kind = class_of(fqn, fields["class"], parameter, optimizers)
    if fields.get("shape") != tuple(parameter.shape):
        saved = text_of(fields.get("shape"))[:200]
        raise InvalidError(
            f"{fqn}: has the shape {saved} in the checkpoint, its parameter {tuple(parameter.shape)}; expected the "
            "same. Build the model that was saved, or leave it out with skip="
        )
    local = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    _require_same_grid(fqn, kind, fields, tuple(local.shape))
    inner: dict[str, torch.Tensor] = {}
    for name, reference in fields["tensors"].items():
        stored = catalog.stored_fqn(reference.fqn)
        spec = catalog.tensors.get(stored)
        if spec is None:
            raise CorruptError(f"{fqn}: the checkpoint lacks its inner tensor {name}; read another copy")
        catalog.require_stored(stored)
        shape = _local_shape(kind, name, spec, tuple(local.shape), fields)
        inner[name] = torch.empty(shape, dtype=torch_dtype(spec.dtype), device=local.device)
    made = _unflattened(fqn, kind, inner, fields, local)
    return dtensor_like(made, parameter) if isinstance(parameter, DTensor) else made


def _require_same_grid(
    fqn: str, kind: type[torch.Tensor], fields: Mapping[str, Any], local_shape: tuple[int, ...]
) -> None:
    """Refuse inner tensors that were stored part by part, if this rank's part is another one.

    Raises:
        InvalidError: Names both numbers of parts.
    """
    saved = fields.get("grid")
    if saved is None and known_class(kind) is not None:
        return
    here = tuple(-(-whole // max(part, 1)) for whole, part in zip(fields["shape"], local_shape, strict=True))
    if (prod(here) > 1 or saved is not None) and saved != here:
        raise other_grid(fqn, fields["class"], text_of(saved), repr(here))


def _unflattened(
    fqn: str, kind: type[torch.Tensor], inner: dict[str, torch.Tensor], fields: Mapping[str, Any], local: torch.Tensor
) -> torch.Tensor:
    """Return an instance of a class that is exactly what was recorded.

    Raises:
        InvalidError: The class refuses the inner tensors and the context, or makes something else of them.
    """
    shape = tuple(local.shape)
    unflatten: Any = getattr(kind, "__tensor_unflatten__")  # noqa: B009 - torch declares it for no class
    try:
        context = built(fields["context"], local.device, shape)
        made = unflatten(dict(inner), context, torch.Size(shape), torch.empty(shape, device="meta").stride())
    except Exception as error:
        raise InvalidError(
            f"{fqn}: {qualified(kind)} refused its recorded context: {type(error).__name__}: {str(error)[:200]}; load "
            "it with the version that it was saved with, or leave it out with skip="
        ) from error
    if type(made) is kind and tuple(made.shape) == shape:
        names, own_context = inner_names(made, fqn)
        known = known_class(kind)
        own = described(own_context, fqn, shape if known is not None else None)
        is_same = set(names) == inner.keys() and all(getattr(made, name) is inner[name] for name in names)
        if is_same and text_of(own) == text_of(fields["context"]):
            return made
    raise InvalidError(
        f"{fqn}: {qualified(kind)} made another tensor of the recorded context; expected the one that was saved. Load "
        "it with the version that it was saved with, or leave it out with skip="
    )


def _local_shape(
    kind: type[torch.Tensor], name: str, spec: TensorSpec, local_shape: tuple[int, ...], fields: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the shape of this rank's part of an inner tensor."""
    if fields.get("grid") is not None:
        return spec.global_shape[1:]
    known = known_class(kind)
    rule = None if known is None else known.rules.get(name)
    if rule is Rule.ELEMENTS:
        return local_shape
    if rule is Rule.RUNS:
        elements, stored = prod(fields["shape"]), prod(spec.global_shape)
        return (prod(local_shape) * stored // max(elements, 1),)
    return spec.global_shape


def _checked_fields(fqn: str, record: FrameworkValue) -> Mapping[str, Any]:
    """Return the fields of a record of plain inner tensors.

    Raises:
        CorruptError: No save writes such a record.
    """
    fields: Value = record.value
    if isinstance(fields, dict):
        tensors = fields.get("tensors")
        is_listed = isinstance(tensors, dict) and all(
            isinstance(name, str) and isinstance(reference, TensorRef) for name, reference in tensors.items()
        )
        if is_listed and isinstance(fields.get("class"), str) and "context" in fields:
            return fields
    raise CorruptError(
        f"{fqn}: the record of a tensor subclass has no class, context and inner tensors; read another copy"
    )
