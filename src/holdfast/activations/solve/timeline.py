"""Memory over time: the forward of one unit, and the step of a model whose columns are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.activations.profile.unit_profile import ModelProfile, Packing, UnitColumn, UnitProfile
from holdfast.activations.solve.storages import TracedStorage


def forward_workspace(
    unit: UnitProfile,
    storages: Iterable[TracedStorage],
    stored_bytes: Mapping[int, int],
    packed: Mapping[int, Packing],
) -> int:
    """Return the peak of a unit's forward: the unit's input, outputs until their last reader, and stored bytes.

    The caller of the unit holds the input until the forward ends.

    Args:
        unit: The class of units.
        storages: Storages of the unit, in the order of the trace.
        stored_bytes: By base: bytes that stay; the bytes of the storage itself if the storage is kept.
        packed: By base: how the storage is packed.
    """
    storages = list(storages)
    last_reader: dict[int, int] = {}
    for each in storages:
        for read in (*each.reads, each.base):
            last_reader[read] = max(last_reader.get(read, 0), each.members[-1])
    read_bases = {base for each in storages for base in each.reads}
    change = [0] * (len(unit.ops) + 1)
    for each in storages:
        kept = stored_bytes.get(each.base, 0)
        is_by_reference = kept == each.bytes
        # A packed tensor exists twice until the last reader has run. An output that no op reads leaves the unit.
        change[each.base] += each.bytes if is_by_reference else each.bytes + kept
        if each.base in read_bases and each.base != 0 and not is_by_reference:
            change[last_reader[each.base] + 1] -= each.bytes
    # Autograd saves, and so packs, the tensors that an op reads before the op runs.
    packed_at: dict[int, int] = {}
    for base, packing in packed.items():
        reader = min((op.number for op in unit.ops[base + 1 :] if base in op.reads), default=base + 1)
        packed_at[reader - 1] = max(packed_at.get(reader - 1, 0), packing.workspace_bytes)
    peak = live = 0
    for number, bytes_more in enumerate(change[:-1]):
        live += bytes_more
        peak = max(peak, live + packed_at.get(number, 0))
    return peak


@dataclass(frozen=True, slots=True)
class StepMoment:
    """A moment of a step at which memory may be highest."""

    bytes: int
    """Device memory at the moment."""
    unit: int
    """Position of the unit that runs, in forward order."""
    phase: str
    """ "forward", "backward" or "overflow"."""


def step_peak(profile: ModelProfile, chosen: Sequence[UnitColumn], *, is_full: bool = True) -> StepMoment:
    """Return the moment of a step with the most memory. The first unit wins a tie. Arguments as for `step_moments`."""
    return max(step_moments(profile, chosen, is_full=is_full), key=lambda each: each.bytes)


def step_moments(profile: ModelProfile, chosen: Sequence[UnitColumn], *, is_full: bool = True) -> list[StepMoment]:
    """Return the moments of a step in their order, simulated unit by unit.

    Args:
        profile: The measured model.
        chosen: The column of each unit, in forward order.
        is_full: Whether packs take the most that they may, and overflow; else packs take the bytes of the fit.
    """
    if not is_full:
        chosen = [replace(each, device_bytes=each.device_bytes - each.spare_bytes) for each in chosen]
    moments = []
    stored, casts = profile.outside_bytes, 0
    for unit, column in enumerate(chosen):
        moments.append(StepMoment(stored + casts + column.forward_workspace_bytes, unit, "forward"))
        stored += column.device_bytes
        casts += column.forward_cast_bytes
    moments.append(StepMoment(stored + casts + profile.loss_workspace_bytes, len(chosen) - 1, "forward"))
    for unit in reversed(range(len(chosen))):
        column = chosen[unit]
        held = stored + profile.gradient_bytes[unit]
        moments.append(StepMoment(held + column.backward_workspace_bytes, unit, "backward"))
        stored -= column.device_bytes
        if is_full and may_overflow(column):
            more = overflow_bytes(profile.classes[profile.order[unit][1]])
            moments.append(StepMoment(stored + profile.gradient_bytes[unit] + more, unit, "overflow"))
    return moments


def may_overflow(column: UnitColumn) -> bool:
    """Return whether a tensor may not fit the pack that the column plans for the tensor."""
    return any(action != "keep" for _, action in column.store)


def overflow_bytes(unit: UnitProfile) -> int:
    """Return the bytes of a unit's backward if no tensor fits its pack: the input, and a whole recomputation."""
    return unit.ops[0].bytes + unit.recompute_workspace_bytes
