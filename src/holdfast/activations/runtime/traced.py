"""The trace of a unit: the ops of one call, and the source of each tensor that autograd saved."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.activations.profile.unit_profile import UnitOp, UnitProfile
from holdfast.activations.runtime.arguments import Form
from holdfast.activations.runtime.signature import Signature
from holdfast.activations.runtime.unit_costs import UnitCosts


@dataclass(frozen=True, slots=True)
class TensorGeometry:
    """The place of a tensor in a storage."""

    size: tuple[int, ...]
    """Size."""
    stride: tuple[int, ...]
    """Strides, in elements."""
    offset: int
    """First element in the storage."""
    dtype: torch.dtype
    """Element type."""
    device: torch.device
    """Device."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorGeometry:
        """Return the geometry of a strided tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)

    @property
    def reach_bytes(self) -> int:
        """Return the bytes from the start of the storage to the end of the last element."""
        if 0 in self.size:
            return 0
        steps = ((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (self.offset + sum(steps) + 1) * self.dtype.itemsize

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this geometry that shows a storage."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


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
class TracedOp:
    """One op of a trace."""

    number: int
    """Position in the trace; 0 is the unit's input."""
    op: Any = None
    """The op overload; None for the input."""
    group: int = 0
    """The op that made the storage which this op shows or changes; the own number for an op that makes storages."""
    form: Form = ()
    """Form of the result, with `returns` as leaves."""
    returns: tuple[OpReturn, ...] = ()
    """Leaves of the result."""
    reads: tuple[int, ...] = ()
    """Other groups whose contents the op reads."""
    bytes: int = 0
    """Bytes of new storage; of storage that autograd saves, where autograd saves any."""
    seconds: float = 0.0
    """Time to run the op."""
    is_view: bool = False
    """Whether the op only makes other tensors of a storage."""
    is_random: bool = False
    """Whether the op draws from the default generator."""
    has_effect: bool = False
    """Whether the op must not run again: the op changes, or reads, memory that may differ in backward."""
    has_value: bool = False
    """Whether the unit's code receives a value that depends on the content of tensors."""
    is_needed: bool = False
    """Whether autograd saves a result of the op, or Python reads its value."""
    is_storable: bool = False
    """Whether a replay may give the stored group to all that read the group."""

    @property
    def overload(self) -> str:
        """Return the op's full name."""
        return "input" if self.op is None else str(self.op)


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
    output_bytes: int
    """Bytes of the tensors that the unit returns."""
    costs: UnitCosts
    """Measured costs, or an estimate from the ops' costs."""
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

    @property
    def fingerprint(self) -> str:
        """Return a digest that units of equal traces share."""
        ops = [
            (op.overload, op.group, op.reads, op.bytes, op.is_random, op.has_effect, op.is_storable, repr(op.returns))
            for op in self.ops
        ]
        return hashlib.sha256(repr((ops, self.saved, self.why_not, self.refused)).encode()).hexdigest()

    def profile(self, units: tuple[str, ...]) -> UnitProfile:
        """Return the measured values for the solver.

        Args:
            units: FQNs of the units of this trace, in forward order.
        """
        return UnitProfile(
            fingerprint=self.fingerprint,
            units=units,
            ops=tuple(_profiled(op) for op in self.ops),
            forward_seconds=self.costs.forward_seconds,
            backward_seconds=self.costs.backward_seconds,
            output_bytes=self.output_bytes,
            recompute_workspace_bytes=self.costs.peak_bytes,
            is_replayable=not self.why_not,
            why_not=self.why_not,
        )


def _profiled(op: TracedOp) -> UnitOp:
    return UnitOp(
        number=op.number,
        overload=op.overload,
        bytes=op.bytes,
        seconds=op.seconds,
        reads=op.reads,
        base=None if op.group == op.number else op.group,
        is_needed=op.is_needed,
        is_storable=op.is_storable,
        is_random=op.is_random,
        has_effect=op.has_effect,
    )
