"""Facts about ops that schemas leave out, or that several schemas say in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from holdfast.activations.runtime.arguments import tensors_of
from holdfast.backends.torch.private_layout import arguments_of

UNNUMBERED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})
"""Ops without a number: hooks and checkpoints call them in numbers of their own."""

FROM_PYTHON = torch.ops.aten.lift_fresh.default
"""Brings a constant of the code into torch."""

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of collectives."""

_DRAW_NAMES = (
    "bernoulli bernoulli_ native_dropout rand rand_like randn randn_like randint randint_like random random_ uniform "
    "uniform_ normal normal_ exponential exponential_ geometric_ cauchy_ log_normal_ randperm"
)
_DRAWS = frozenset(_DRAW_NAMES.split())
"""Random ops whose number of draws depends on the geometry alone; attention with dropout likewise."""

_SHAPE_READ_NAMES = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "new_empty_strided zero_ bernoulli_ uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_"
)
_SHAPE_READS = frozenset(_SHAPE_READ_NAMES.split())
"""Ops that read the geometry of their first argument, not its content."""

_BLANK_NAMES = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided"
BLANKS = frozenset(_BLANK_NAMES.split())
"""Ops that make memory without content."""

_RESHAPED = frozenset({"resize_", "resize_as_", "set_"})
"""Ops that give a tensor another geometry."""


@lru_cache(maxsize=4096)
def _arguments_of(func: Any) -> tuple[tuple[int, str, bool], ...]:
    return tuple((position, *each) for position, each in enumerate(arguments_of(func)))


def is_collective(func: Any) -> bool:
    """Return whether an op exchanges data with other ranks."""
    return func.namespace in _COLLECTIVES


def first_read(func: Any) -> int:
    """Return the number of the first tensor among an op's arguments whose content the op reads."""
    return int(func.overloadpacket.__name__ in _SHAPE_READS)


def why_not_again(func: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return why a unit with a call of this op is not replayed; empty if it may be."""
    name = func.overloadpacket.__name__
    if torch.Tag.dynamic_output_shape in func.tags:
        is_index = func is torch.ops.aten.index.Tensor
        if not is_index or any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:]):
            return f"the shape of {func} depends on data"
    if name in _RESHAPED:
        return f"{func} gives a tensor another geometry"
    if torch.Tag.nondeterministic_seeded in func.tags and name not in _DRAWS and "attention" not in name:
        return f"the number of draws of {func} may depend on data"
    return ""


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an op that the op changes by its schema."""
    written = [(position, name) for position, name, is_written in _arguments_of(func) if is_written]
    return tensors_of([args[position] if position < len(args) else kwargs.get(name) for position, name in written])


def is_random_op(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an op draws. Attention draws with dropout alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    chances = (position for position, name, _ in _arguments_of(func) if name == "dropout_p")
    position = next(chances, None)
    return position is None or bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided memory, no subclass with ops of its own."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
