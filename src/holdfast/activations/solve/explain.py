"""A plan for people: the ops that each group of units keeps, packs, runs again and skips, their price, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from holdfast.activations.profile.solved_plan import CurvePoint, SolvedPlan
from holdfast.activations.profile.unit_profile import UnitColumn, UnitProfile
from holdfast.activations.solve.master import chosen_columns
from holdfast.activations.solve.timeline import StepMoment, step_moments
from holdfast.errors import first_three, printable, shown_bytes

_GIB_MS = 1e3 * 2**30
"""Seconds for a byte times this number are milliseconds for a GiB."""


@dataclass(frozen=True, slots=True)
class OpGroup:
    """The ops of a unit that a column treats alike."""

    ops: tuple[str, ...]
    """Names, such as "aten.gelu.default#4"; the name of a packed op follows the packing."""
    bytes: int
    """Bytes of the outputs."""
    stored_bytes: int
    """Bytes that stay between forward and backward."""
    seconds: float
    """Time for each unit and step: to pack and unpack, or to run again."""


@dataclass(frozen=True, slots=True)
class ColumnUse:
    """One column, and the units that use the column. Every number is of one unit."""

    units: tuple[str, ...]
    """FQNs, in forward order."""
    actions: dict[str, OpGroup]
    """By "kept", "packed", "run again" (also ops that run only to advance a generator) and "skipped"."""
    stored_bytes: int
    """Bytes that stay between forward and backward."""
    added_seconds: float
    """Time that the column adds to a step."""
    is_measured: bool
    """Whether a fit has measured this time; else the time is an estimate from the ops."""
    ms_per_gib_more: float | None
    """Milliseconds a step that one GiB more would save, as a rate; None if no column is faster."""
    ms_per_gib_less: float | None
    """Milliseconds a step that one GiB less would cost, as a rate; None if no column stores less."""
    why_not: str
    """Why the unit is never run again; empty if the unit may be."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan without the profile and the columns that no unit uses."""

    budget_bytes: int
    """Most bytes that a step may take above the memory that the job holds before the step."""
    error_bound: float
    """Largest error of a stored element, relative to the rms of its tensor; 0 for exact gradients."""
    keep_all_peak_bytes: int
    """Peak of a step that keeps everything."""
    predicted_peak_bytes: int
    """Peak of a step, from the profile."""
    measured_peak_bytes: int
    """Peak that the fit measured; 0 if not measured."""
    predicted_slowdown: float
    """Time of a step divided by the time of a step that keeps everything."""
    measured_slowdown: float
    """The same, as the fit measured the time; 0 if not measured."""
    gradient_errors: tuple[tuple[str, float], ...]
    """Parameters, each with the relative error of the gradient; "" stands for all; empty for exact gradients."""
    outside_bytes: int
    """Bytes that live outside units during the step; no plan manages these bytes."""
    peak_unit: str
    """FQN of the unit that runs at the peak."""
    peak_phase: str
    """ "forward" or "backward"."""
    uses: tuple[ColumnUse, ...]
    """Columns in use, class by class."""
    moments: tuple[StepMoment, ...]
    """The memory of a step over time."""
    curve: tuple[CurvePoint, ...]
    """Peak and slowdown of other budgets, smallest peak first; empty if the plan was never in a file."""


def summary_of(plan: SolvedPlan) -> PlanSummary:
    """Return the summary of a plan."""
    profile = plan.profile
    moments = step_moments(profile, chosen_columns(profile, plan.columns, plan.choice), is_full=False)
    peak = max(moments, key=lambda each: each.bytes)
    same = {each.name: getattr(plan, each.name) for each in fields(PlanSummary) if hasattr(plan, each.name)}
    return PlanSummary(
        **same,
        keep_all_peak_bytes=profile.keep_all_peak_bytes,
        outside_bytes=profile.outside_bytes,
        peak_unit=profile.order[peak.unit][0],
        peak_phase=peak.phase,
        uses=tuple(_uses(plan)),
        moments=tuple(moments),
    )


def predictions(summary: PlanSummary) -> str:
    """Return predicted and measured peak and slowdown as text for people."""
    share = 100 * summary.predicted_peak_bytes / max(summary.keep_all_peak_bytes, 1)
    text = (
        f"budget {shown_bytes(summary.budget_bytes)}: predicted peak {shown_bytes(summary.predicted_peak_bytes)} "
        f"({share:.0f} % of keeping everything), step time × {summary.predicted_slowdown:.3f}"
    )
    if summary.measured_peak_bytes:
        measured = shown_bytes(summary.measured_peak_bytes)
        text += f"\nmeasured by the fit: peak {measured}, step time × {summary.measured_slowdown:.3f}"
    if summary.gradient_errors:
        errors = dict(summary.gradient_errors)
        worst = max(filter(None, errors), key=lambda name: errors[name])
        text += f"\nrelative error of the gradient: {errors['']:.2g}; worst: {errors[worst]:.2g} ({printable(worst)})"
    return text


def bytes_by_action(summary: PlanSummary) -> str:
    """Return the bytes of all units by action as text for people, and the bytes that no plan manages."""
    totals: Counter[str] = Counter()
    for use in summary.uses:
        for action, group in use.actions.items():
            totals[action] += len(use.units) * group.bytes
        totals["packed as"] += len(use.units) * use.actions["packed"].stored_bytes
    kept, packs, again = (shown_bytes(totals[action]) for action in ("kept", "packed as", "run again"))
    packed = f"{shown_bytes(totals['packed'])} packed as {packs}, " if totals["packed"] else ""
    return (
        f"in units: {kept} kept, {packed}{again} run again; outside: {shown_bytes(summary.outside_bytes)}, not managed"
    )


def explained(summary: PlanSummary) -> str:
    """Return a plan for people: the prediction, then each group of units with its column and the price of memory."""
    lines = [
        predictions(summary),
        f"the peak is in the {summary.peak_phase} of {printable(summary.peak_unit)}",
        bytes_by_action(summary),
    ]
    for use in summary.uses:
        names = first_three(map(printable, use.units))
        count = f"{len(use.units)} unit{'s' * (len(use.units) != 1)}"
        lines.append(
            f"{count} ({names}): {shown_bytes(use.stored_bytes)} stored, {1e3 * use.added_seconds:.2f} ms added"
            f"{'' if use.is_measured else ' (estimated)'}, each"
        )
        lines += _action_lines(use)
        lines.append(f"  price: {_price(use)}")
        if use.why_not:
            lines.append(f"  never run again: {printable(use.why_not)}")
    return "\n".join(lines)


def _action_lines(use: ColumnUse) -> Iterator[str]:
    for action, group in use.actions.items():
        if group.ops:
            packs = f" as {shown_bytes(group.stored_bytes)}" if action == "packed" else ""
            freed = max(group.bytes - group.stored_bytes, 1)
            price = f", {group.seconds / freed * _GIB_MS:.0f} ms for a GiB" if group.seconds else ""
            ops = first_three(map(printable, group.ops))
            yield f"  {action + ':':<10} {shown_bytes(group.bytes)}{packs}{price}: {ops}"


def _price(use: ColumnUse) -> str:
    more, less = use.ms_per_gib_more, use.ms_per_gib_less
    saves = "nothing is faster" if more is None else f"one GiB more would save {more:.0f} ms a step"
    costs = "nothing stores less" if less is None else f"one GiB less would cost {less:.0f} ms"
    return f"{saves}, {costs}"


def _uses(plan: SolvedPlan) -> Iterator[ColumnUse]:
    units: dict[tuple[int, int], list[str]] = {}
    for (name, kind), index in zip(plan.profile.order, plan.choice, strict=True):
        units.setdefault((kind, index), []).append(name)
    for (kind, index), names in sorted(units.items()):
        unit, columns = plan.profile.classes[kind], plan.columns[kind]
        yield _use(unit, columns, columns[index], tuple(names))


def _use(unit: UnitProfile, columns: Sequence[UnitColumn], column: UnitColumn, names: tuple[str, ...]) -> ColumnUse:
    store, run = dict(column.store), {*column.run, *column.draw}
    if run:
        store.setdefault(0, "keep")
    packs = {number: each for number in store for each in unit.ops[number].packings if each.action == store[number]}

    def group(numbers: Iterable[int], stored_bytes: int = 0, seconds: float = 0.0) -> OpGroup:
        ops = [unit.ops[number] for number in sorted(numbers) if unit.ops[number].base is None]
        packings = [f"{packs[op.number].action} " if op.number in packs else "" for op in ops]
        shown = tuple(f"{packing}{op.overload}#{op.number}" for packing, op in zip(packings, ops, strict=True))
        return OpGroup(shown, sum(op.bytes for op in ops), stored_bytes, seconds)

    packed_bytes = sum(each.device_bytes for each in packs.values())
    # Without a replay an op that backward does not need is one of plain training.
    skipped = [op.number for op in unit.ops if run and op.bytes and op.number not in store and op.number not in run]
    return ColumnUse(
        units=names,
        actions={
            "kept": group(store.keys() - packs.keys(), column.device_bytes - packed_bytes),
            "packed": group(packs, packed_bytes, sum(each.seconds for each in packs.values())),
            "run again": group(run, seconds=sum(unit.ops[number].seconds for number in run)),
            "skipped": group(skipped),
        },
        stored_bytes=column.device_bytes,
        added_seconds=column.seconds,
        is_measured=column.is_measured,
        ms_per_gib_more=_rate(column, columns, is_more=True),
        ms_per_gib_less=_rate(column, columns, is_more=False),
        why_not=unit.why_not,
    )


def _rate(column: UnitColumn, columns: Sequence[UnitColumn], *, is_more: bool) -> float | None:
    """Return the best exchange of time for memory with another column of more, or of less, stored bytes."""
    rates = [
        (column.seconds - each.seconds) / (each.device_bytes - column.device_bytes) * _GIB_MS
        for each in columns
        if each.device_bytes != column.device_bytes and (each.device_bytes > column.device_bytes) == is_more
    ]
    if is_more:
        return max((rate for rate in rates if rate > 0), default=None)
    return max(min(rates), 0.0) if rates else None
