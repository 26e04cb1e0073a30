"""The trace of a unit: the ops of one call, and the source of each tensor that autograd saved."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from holdfast.activations.profile.unit_profile import Packing, UnitOp, UnitProfile
from holdfast.activations.runtime.dense import TensorGeometry
from holdfast.activations.runtime.signature import Signature


@dataclass(frozen=True, slots=True)
class OpReturn:
    """One leaf of an op's result."""

    kind: str
    """"fresh" (a tensor of new storage), "argument" (a tensor that the op changed), "view" or "value"."""
    slot: int = 0
    """Fresh: number of the storage among those of the op. Argument: position among the op's tensors."""
    geometry: TensorGeometry | None = None
    """Geometry of a fresh tensor."""
    value: Any = None
    """A value that is no tensor."""


@dataclass(frozen=True, slots=True)
class TracedOp(UnitOp):
    """One op of a trace, as a replay follows the op."""

    op: Any = None
    """The op overload; None for the input."""
    form: Any = ()
    """The result, with `returns` as leaves."""
    returns: tuple[OpReturn, ...] = ()
    """Leaves of the result."""
    is_view: bool = False
    """Whether the op only makes other tensors of a storage."""
    has_value: bool = False
    """Whether the unit's code receives a value that depends on the content of tensors."""

    @property
    def group(self) -> int:
        """Return the op that made the storage which this op shows or changes: the op itself, if it makes storages."""
        return self.number if self.base is None else self.base


@dataclass(frozen=True, slots=True)
class SavedSource:
    """Where a tensor that autograd saves comes from."""

    group: int | None
    """The group of the storage; 0 for the unit's input, None for storages from outside."""
    slot: int
    """Number of the storage in the group."""
    geometry: TensorGeometry
    """Geometry of the saved tensor."""
    is_cast: bool
    """Whether the tensor is a cast of a parameter or buffer: every replay makes the cast again."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has this geometry; offsets differ in parameters and views of arguments."""
        expected = self.geometry
        return (
            tensor.shape == expected.size
            and tensor.dtype == expected.dtype
            and tensor.stride() == expected.stride
            and (not self.group or tensor.storage_offset() == expected.offset)
        )


@dataclass(frozen=True, slots=True)
class UnitTrace:
    """One call of a unit. The ops of a group make, show or change the storages of one op."""

    signature: Signature
    """Signature of the call."""
    ops: tuple[TracedOp, ...]
    """The ops, by number."""
    saved: tuple[SavedSource, ...]
    """Each tensor that autograd saved, in order."""
    cast_bytes: int
    """Bytes of parameters in another dtype that autograd saved: autocast makes them."""
    casts_stay: bool
    """Whether casts stay until an autocast region around the unit ends, also those that autograd does not save."""
    peak_bytes: int
    """Most bytes of forward and backward above the unit's input, measured; else those of the forward's ops."""
    why_not: str
    """Why ops may not run again; empty for a unit that replays."""
    refused: str
    """Why a plan cannot manage the unit at all; empty for a unit that a plan can manage."""

    @property
    def is_random(self) -> bool:
        """Return whether any op draws."""
        return any(op.is_random for op in self.ops)

    @property
    def has_effect(self) -> bool:
        """Return whether any op has an effect."""
        return any(op.has_effect for op in self.ops)

    def packed_geometry(self, group: int) -> tuple[int, TensorGeometry]:
        """Return slot and geometry of the largest result of a group that autograd saves: a packing packs this one."""
        saved = {source.slot for source in self.saved if source.group == group}
        found = [(each.slot, each.geometry) for each in self.ops[group].returns if each.geometry and each.slot in saved]
        return max(found, key=lambda each: each[1].reach_bytes)

    @property
    def fingerprint(self) -> str:
        """Return a digest that units of equal traces share."""
        ops = [
            (op.overload, op.group, op.reads, op.bytes, op.is_random, op.has_effect, op.is_storable, repr(op.returns))
            for op in self.ops
        ]
        # The ranks of a job use devices of other numbers.
        text = re.sub(r", index=\d+", "", repr((ops, self.saved, self.why_not, self.refused)))
        return hashlib.sha256(text.encode()).hexdigest()

    def profile(self, units: tuple[str, ...], samples: Sequence[UnitTrace] = ()) -> UnitProfile:
        """Return the measured values for the solver.

        Args:
            units: FQNs of the units of this trace, in forward order.
            samples: Measured traces of some of them, whose contents all fit the packings of the profile; () for this
                trace alone.
        """
        return UnitProfile(
            fingerprint=self.fingerprint,
            units=units,
            ops=tuple(_profiled(op, [each.ops[op.number].packings for each in samples or [self]]) for op in self.ops),
            cast_bytes=self.cast_bytes,
            recompute_workspace_bytes=self.peak_bytes,
            why_not=self.why_not,
            casts_stay=self.casts_stay,
        )


def _profiled(op: TracedOp, offered: Sequence[tuple[Packing, ...]]) -> UnitOp:
    plain = UnitOp(*(getattr(op, each.name) for each in fields(UnitOp)))
    found = [[each for packings in offered for each in packings if each.action == one.action] for one in offered[0]]
    return replace(plain, packings=tuple(_largest(same) for same in found if len(same) == len(offered)))


def _largest(found: Sequence[Packing]) -> Packing:
    """Return a packing for the contents of several units: the most bytes that one may take, the mean of those taken."""
    device_bytes = max(each.device_bytes for each in found)
    return replace(
        found[0],
        device_bytes=device_bytes,
        seconds=min(each.seconds for each in found),
        spare_bytes=device_bytes - sum(each.device_bytes - each.spare_bytes for each in found) // len(found),
        workspace_bytes=max(each.workspace_bytes for each in found),
    )
