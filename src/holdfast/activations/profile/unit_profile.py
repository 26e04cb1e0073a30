"""Measured values of a model's units, and the ways to treat a unit.

A unit is a module whose calls are managed together, for example a transformer block. Units with equal traces form one
class. Every number of bytes is device memory, every number of seconds is time on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

BYTES_MAX = 1 << 60
"""Limit of each number of bytes in a plan: sums of such numbers stay exact."""

Bytes = Annotated[int, msgspec.Meta(ge=0, lt=BYTES_MAX)]
"""A number of bytes. A plan file with another number is refused."""

Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
"""Seconds, or a factor of a time. Sums and prices stay finite."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to pack the output of one op."""

    action: str
    """Name of the packing: "bits", "narrow", "planes", "sparse", "q8" or "q4"."""
    device_bytes: Bytes
    """Most bytes on the device that the packed output takes: content that needs more overflows."""
    seconds: Seconds
    """Time to pack and to unpack."""
    is_lossy: bool = False
    """Whether the unpacked tensor may differ from the packed one."""
    spare_bytes: Bytes = 0
    """Bytes among `device_bytes` that the content of the fit did not take."""
    workspace_bytes: Bytes = 0
    """Temporary bytes of packing."""


@dataclass(frozen=True, slots=True)
class UnitOp:
    """One op of a unit's trace. Op 0 is the unit's input.

    A base's `is_needed`, `is_storable` and `packings` stand for the whole storage, as the last in-place op leaves it.
    `seconds`, `reads`, `is_random` and `has_effect` of a view or an in-place op are those of the op alone.
    """

    number: int
    """Position in the trace."""
    overload: str
    """The op's full name; "input" for op 0."""
    bytes: Bytes
    """Bytes of new storage. A view or an in-place op has none."""
    seconds: Seconds
    """Time to run the op once."""
    reads: tuple[int, ...]
    """Ops (bases) that made the storages that this op reads."""
    base: int | None
    """For a view or an in-place op: the op that made the storage."""
    is_needed: bool
    """Whether autograd saves the output or a view of the output."""
    is_storable: bool
    """Whether the output can be stored in forward and given back in backward."""
    is_random: bool
    """Whether the op draws from a generator."""
    has_effect: bool
    """Whether the op writes to memory that the unit did not make."""
    packings: tuple[Packing, ...] = ()
    """Ways to store the output other than keeping the tensor; where no replay is allowed, only ways that always fit."""


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """One class of units with equal traces."""

    fingerprint: str
    """Digest of the trace."""
    units: tuple[str, ...]
    """FQNs of the units, in forward order."""
    ops: Annotated[tuple[UnitOp, ...], msgspec.Meta(min_length=1)]
    """The trace; the index of an op is the op's number."""
    cast_bytes: Bytes
    """Bytes of parameters in another dtype, which autograd saves unless the unit replays."""
    recompute_workspace_bytes: Bytes
    """Peak bytes of a backward that recomputes the whole unit, above the stored bytes."""
    why_not: str = ""
    """Why ops may not run again in backward; empty if they may."""
    casts_stay: bool = False
    """Whether autocast keeps the casts until the forward of the model ends, also where the unit replays."""

    @property
    def is_replayable(self) -> bool:
        """Return whether ops of the unit may run again in backward."""
        return not self.why_not


@dataclass(frozen=True, slots=True)
class UnitColumn:
    """One way to treat a unit. A unit replays if `run` or `draw` is not empty."""

    store: tuple[tuple[int, str], ...]
    """Stored ops (bases), each with "keep" or the action of a packing. A replay holds op 0 in any case."""
    run: tuple[int, ...]
    """Ops that the replay runs: bases, each with all views and in-place ops."""
    draw: tuple[int, ...]
    """Random ops that the replay runs only to advance the generator."""
    device_bytes: Bytes
    """Stored bytes between forward and backward."""
    seconds: Seconds
    """Time that the column adds to a step."""
    forward_workspace_bytes: Bytes
    """Temporary bytes of the forward."""
    backward_workspace_bytes: Bytes
    """Temporary bytes of the backward."""
    is_lossy: bool
    """Whether a stored tensor may differ from the original."""
    spare_bytes: Bytes = 0
    """Bytes among `device_bytes` that packs may take, and did not take in the fit."""
    is_measured: bool = False
    """Whether `seconds` are those of units in a step under the column; else they are the sum of the ops alone."""
    forward_cast_bytes: Bytes = 0
    """Bytes of casts that `device_bytes` lacks, from the unit's forward until the forward of the model ends."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A measured model: the units in forward order, and the memory that no unit manages."""

    classes: tuple[UnitProfile, ...]
    """Classes of units."""
    order: tuple[tuple[str, int], ...]
    """FQN of each unit and the index of the unit's class, in forward order."""
    gradient_bytes: tuple[Bytes, ...]
    """For each unit: bytes of gradients that exist at the unit's backward."""
    outside_bytes: Bytes
    """Bytes that live outside units during the step."""
    keep_all_peak_bytes: Bytes
    """Peak of a step that keeps everything."""
    step_seconds: Annotated[float, msgspec.Meta(gt=1e-12, lt=1e12)]
    """Time of a step that keeps everything."""
    loss_workspace_bytes: Bytes = 0
    """Temporary bytes between the last unit's forward and the first backward, while autocast keeps casts."""
