"""Values for the part of a training state that is not tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

Value = object
"""A Python value of the closed set that `format.values` encodes, containers included."""

GroupKind = Literal["dict", "module", "optimizer", "stateful"]


@dataclass(frozen=True, slots=True)
class Group:
    """A node of the state: a nested dict, or the non-tensor part of a module, optimizer or stateful object.

    `dict`: one entry per key. `module`: extra state by FQN. `optimizer`: `param_groups` and `state`, each
    a dict by parameter FQN. `stateful`: the one entry `state`, what `state_dict()` returned.
    """

    kind: GroupKind
    """The kind of the node in the saved state."""

    items: dict[str, Value] = field(default_factory=dict)
    """Children by name, in their order."""


PIECES_RECORD = "holdfast_pieces"
"""Key at the top of a tree under which `holdfast.pieces` keeps names of its caller. It is no part of the state."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Takes the place of the tensor `fqn` in a container."""

    fqn: str
    """Name of the tensor in the index."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Takes the place of a leaf that the caller left out of the checkpoint."""

    path: str
    """Dotted name of the leaf."""


@dataclass(frozen=True, slots=True)
class PerRankRef:
    """Reference in the tree to a value that differs by rank; each rank stores its own in its part."""

    path: str
    """Dotted name of the leaf, and its name in each rank's part."""


@dataclass(frozen=True, slots=True)
class FrameworkValue:
    """A value that only a framework can build. It is stored as text or bytes, so that it can be shown without the
    framework.
    """

    kind: str
    """`torch.dtype`, `torch.size`, `torch.device`, `torch.tensor` (a small tensor kept as a value) or `SUBCLASS`."""

    value: Value
    """Neutral content: a string, a tuple of ints, or for `torch.tensor` a dict of dtype, shape and bytes."""


SUBCLASS = "torch.subclass"
"""Kind of the record that stands for a tensor subclass. Its value is a dict of `class`, `dtype`, `shape`, `context`,
`tensors` (a `TensorRef`, or another record, by attribute) and `grid` (parts in each dimension, if each is stored by
itself)."""


def is_subclass_record(value: Value) -> TypeGuard[FrameworkValue]:
    """Return whether a value stands for a tensor subclass, whose inner tensors are stored under its name."""
    return isinstance(value, FrameworkValue) and value.kind == SUBCLASS


def per_rank_paths(value: Value) -> Iterator[str]:
    """Yield the paths of values that differ by rank."""
    if isinstance(value, PerRankRef):
        yield value.path
        return
    items = value.items if isinstance(value, Group) else value
    inner = items.values() if isinstance(items, dict) else items if isinstance(items, list | tuple) else ()
    for each in inner:
        yield from per_rank_paths(each)
