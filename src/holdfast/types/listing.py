"""Another system's checkpoint as a list of tensors, each with the file and offset of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.geometry.region import Region
from holdfast.geometry.tensor import TensorSpec
from holdfast.geometry.value_class import value_class
from holdfast.types.values import Group


@value_class
class ListedPiece:
    """A piece of a tensor where another system put it."""

    region: Region
    """Which part of the tensor: a box or a flat range, its elements in row-major order in the file, without gaps."""

    file: str
    """Key of the file."""

    offset: int
    """Bytes from the start of the file to the first element; of any alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignListing:
    """A checkpoint that Holdfast did not write, listed and not converted: its bytes stay where they are."""

    format: str
    """What wrote it, with a version where it says one, e.g. `deepspeed 0.19.8, ZeRO-1`; for people."""

    tensors: Mapping[str, TensorSpec]
    """Every tensor, by the FQN it has for Holdfast."""

    pieces: Mapping[str, Sequence[ListedPiece]]
    """By FQN, pieces that cover the tensor exactly once; none, or an empty one, for an empty tensor. Tensors may share
    bytes."""

    files: Mapping[str, int]
    """Bytes of every file with a piece, by key."""

    tree: Group
    """What is not a tensor, of kind `dict`, as a state saved by Holdfast would have it: `model` of kind `module` and
    `optimizer` of kind `optimizer` if the format distinguishes them."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied names: alias to the FQN that is listed."""

    replicas: Mapping[str, Sequence[ListedPiece]] = field(default_factory=dict)
    """Further copies of listed tensors, by FQN, which should hold the same bytes; `verify` compares them."""

    casts: Mapping[str, str] = field(default_factory=dict)
    """FQN of a master copy to the FQN of what was cast from it, where both are listed: a target is filled from the one
    that has its type."""

    step: int | None = None
    """Training iteration, if the format records it."""

    world_size: int = 1
    """Number of ranks that wrote it, as far as its files show."""

    remarks: Sequence[str] = ()
    """What a reader should know: what was left out or ignored, and why. One sentence each, naming the place."""
