"""The profile of a job: the worst measurements of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

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
        worst = _worst(worst, other)
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


def _worst(one: Any, two: Any) -> Any:
    """Return a value with the larger number of each pair. Names, and numbers of ops, are equal."""
    if isinstance(one, UnitOp):
        # The contents of tensors differ between ranks: a packing counts where every rank offers one.
        mine, theirs = ({packing.action: packing for packing in op.packings} for op in (one, two))
        packings = tuple(_worst_packing(each, theirs[action]) for action, each in mine.items() if action in theirs)
        return replace(one, seconds=max(one.seconds, two.seconds), packings=packings)
    if isinstance(one, tuple):
        return tuple(map(_worst, one, two))
    if isinstance(one, UnitProfile | ModelProfile):
        return type(one)(*(_worst(getattr(one, each.name), getattr(two, each.name)) for each in fields(one)))
    return max(one, two)


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
