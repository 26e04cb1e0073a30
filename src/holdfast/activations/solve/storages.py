"""The storages of a unit's trace: each base op with the views and in-place ops of its storage."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.activations.profile.unit_profile import Packing, UnitProfile


@dataclass(frozen=True, slots=True)
class TracedStorage:
    """One storage that the unit makes. Views and in-place ops have no variables: the base stands for them."""

    base: int
    """The op that makes the storage."""
    members: tuple[int, ...]
    """The base, its views and its in-place ops, in the order of the trace."""
    bytes: int
    """Bytes of the storage."""
    seconds: float
    """Time to run all members again."""
    reads: tuple[int, ...]
    """Bases of the other storages that the members read."""
    is_needed: bool
    """Whether autograd saves the storage."""
    is_storable: bool
    """Whether the storage can be stored in forward, by reference or packed."""
    is_kept: bool
    """Whether the storage must be kept where anything needs it: an op with an effect, or a reader of one, made it."""
    packings: tuple[Packing, ...]
    """Ways to pack the storage."""


def storages_of(unit: UnitProfile, *, allow_lossy: bool) -> dict[int, TracedStorage]:
    """Return the storages of a unit by base, in the order of the trace.

    Args:
        unit: The class of units.
        allow_lossy: Whether packings that lose bits are offered. The unit's input is never packed with loss.
    """
    members: dict[int, list[int]] = {}
    for op in unit.ops:
        members.setdefault(op.number if op.base is None else op.base, []).append(op.number)
    effects = {base for base, numbers in members.items() if any(unit.ops[number].has_effect for number in numbers)}
    return {base: _storage(unit, numbers, effects, allow_lossy) for base, numbers in members.items()}


def _storage(unit: UnitProfile, numbers: list[int], effects: set[int], allow_lossy: bool) -> TracedStorage:
    base, ops = unit.ops[numbers[0]], [unit.ops[number] for number in numbers]
    reads = tuple(sorted({read for op in ops for read in op.reads} - {base.number}))
    is_kept = base.number in effects or not effects.isdisjoint(reads)
    lossy_too = allow_lossy and base.number != 0
    packings = tuple(each for each in base.packings if lossy_too or not each.is_lossy)
    return TracedStorage(
        base=base.number,
        members=tuple(numbers),
        bytes=base.bytes,
        seconds=sum(op.seconds for op in ops),
        reads=reads,
        is_needed=any(op.is_needed for op in ops),
        # Without a replay nothing reads a stored tensor but autograd: a reference is always right.
        is_storable=base.is_storable or base.number == 0 or not unit.is_replayable,
        is_kept=is_kept,
        packings=() if is_kept or not base.is_storable else packings,
    )
