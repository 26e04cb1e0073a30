"""A record of the redo log: everything between two boundaries of training, as one rank saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.base.types.values import Group, Value


@dataclass(frozen=True, slots=True)
class Software:
    """What a redo must have in common with the training that was recorded, to give equal bits."""

    versions: Mapping[str, str]
    """Versions and capabilities by name: torch, the processor capability, the device."""

    optimizers: Mapping[str, str]
    """By path of each optimizer in the state: its class, and the flags that choose the kernel."""


@dataclass(frozen=True, slots=True)
class OptimizerCall:
    """One step of one optimizer."""

    path: str
    """Path of the optimizer in the state."""

    groups: tuple[Mapping[str, Value], ...]
    """The hyperparameters of each group, types kept: a tensor learning rate differs from a float."""

    gradients: tuple[str, ...]
    """FQNs of the parameters that had a gradient. The others had none: None is not zero."""

    scaling: Mapping[str, Value] = field(default_factory=dict)
    """`grad_scale` and `found_inf`, if a scaler set them: a fused step sees scaled gradients."""


@dataclass(frozen=True, slots=True)
class AfterImage:
    """A tensor of the state that changed otherwise than by a step of its optimizer."""

    fqn: str
    """The tensor."""

    after_call: int
    """How many calls of the record come before the change."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of one rank, without the bytes of tensors."""

    step: int
    """The boundary that ends the record."""

    calls: tuple[OptimizerCall, ...]
    """The steps of optimizers, in their order."""

    images: tuple[AfterImage, ...]
    """Changed tensors, in their order."""

    tree: Group
    """The values at the boundary that are not tensors."""

    per_rank: Mapping[str, Value]
    """Values of this rank alone, by path."""

    sums: Mapping[str, int]
    """Sums over this rank's part of the tensors that are due at this boundary, by FQN."""

    software: Software
    """What the redo must have in common with this rank."""

    not_resumable: str = ""
    """Why a load must not end at this boundary; empty if a load may."""

    held: tuple[str, ...] = ()
    """FQNs of the parameters that have a gradient at the boundary, consumed or zero. A step with a gradient of zeros
    decays weights and moments; a step without a gradient leaves both."""


def call_tensor(call: int, fqn: str) -> str:
    """Return the name of a gradient in a record: the number of its call, and its parameter.

    Example:
        assert call_tensor(0, "model.weight") == "0/model.weight"
    """
    return f"{call}/{fqn}"


def image_tensor(number: int, fqn: str) -> str:
    """Return the name of an after-image in a record: its number in the record, and its tensor.

    Example:
        assert image_tensor(2, "model.bn.running_mean") == "i2/model.bn.running_mean"
    """
    return f"i{number}/{fqn}"
