"""The profile of a job: the worst measurements of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import ModelProfile, Packing, UnitOp, UnitProfile
from holdfast.errors import InvalidError


class MeasuredStep(NamedTuple):
    """The measurements of a rank's step under a plan. The fields are those of `SolvedPlan`."""

    measured_peak_bytes: int
    measured_slowdown: float
    gradient_errors: tuple[tuple[str, float], ...]


def worst_profile(profiles: Iterable[ModelProfile]) -> ModelProfile:
    """Return the profile with the most bytes and seconds of all ranks, and with the packings of which all have one.

    Args:
        profiles: The profile of each rank, by rank.
    Raises:
        InvalidError: Ranks have other units, or units of other traces.
    """
    rest = iter(profiles)
    worst = next(rest)
    for rank, other in enumerate(rest, 1):
        _require_same_units(worst, other, rank)
        pairs = zip(worst.classes, other.classes, strict=True)
        worst = ModelProfile(
            classes=tuple(_worst_unit(one, two) for one, two in pairs),
            order=worst.order,
            gradient_bytes=tuple(map(max, worst.gradient_bytes, other.gradient_bytes)),
            outside_bytes=max(worst.outside_bytes, other.outside_bytes),
            keep_all_peak_bytes=max(worst.keep_all_peak_bytes, other.keep_all_peak_bytes),
            step_seconds=max(worst.step_seconds, other.step_seconds),
            loss_workspace_bytes=max(worst.loss_workspace_bytes, other.loss_workspace_bytes),
        )
    return worst


def worst_measured(plan: SolvedPlan, found: Iterable[MeasuredStep]) -> SolvedPlan:
    """Return a plan with the highest measurements of any rank.

    Args:
        plan: The plan, equal on all ranks.
        found: The measurements by rank.
    """
    peaks, slowdowns, errors = zip(*found, strict=True)
    return replace(
        plan,
        measured_peak_bytes=max(peaks),
        measured_slowdown=max(slowdowns),
        gradient_errors=tuple(max(of_ranks) for of_ranks in zip(*errors, strict=True)),
    )


def _require_same_units(first: ModelProfile, other: ModelProfile, rank: int) -> None:
    for expected, found in zip_longest(_descriptions(first), _descriptions(other), fillvalue="no unit"):
        if expected != found:
            raise InvalidError(
                f"rank {rank}: {found}; expected {expected}, as on rank 0. Fit the same model, with batches of one "
                "shape, on every rank"
            )


def _descriptions(profile: ModelProfile) -> Iterator[str]:
    """Yield the facts that must be equal on all ranks, with readable ones before digests."""
    yield from (f"unit {name} of class {kind}" for name, kind in profile.order)
    for unit in profile.classes:
        for op in unit.ops:
            yield f"unit {unit.units[0]}, op {op.number} {op.overload} with {op.bytes:,} bytes"
        yield f"unit {unit.units[0]}, trace {unit.fingerprint[:16]}"


def _worst_unit(one: UnitProfile, two: UnitProfile) -> UnitProfile:
    return replace(
        one,
        ops=tuple(map(_worst_op, one.ops, two.ops)),
        recompute_workspace_bytes=max(one.recompute_workspace_bytes, two.recompute_workspace_bytes),
    )


def _worst_op(one: UnitOp, two: UnitOp) -> UnitOp:
    # The contents of tensors differ between ranks: a packing counts where every rank offers one.
    theirs = {packing.action: packing for packing in two.packings}
    packings = [_worst_packing(each, theirs[each.action]) for each in one.packings if each.action in theirs]
    return replace(one, seconds=max(one.seconds, two.seconds), packings=tuple(packings))


def _worst_packing(one: Packing, two: Packing) -> Packing:
    device_bytes = max(one.device_bytes, two.device_bytes)
    taken_bytes = max(one.device_bytes - one.spare_bytes, two.device_bytes - two.spare_bytes)
    return replace(
        one,
        device_bytes=device_bytes,
        seconds=max(one.seconds, two.seconds),
        spare_bytes=device_bytes - taken_bytes,
        workspace_bytes=max(one.workspace_bytes, two.workspace_bytes),
    )
