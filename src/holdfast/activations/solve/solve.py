"""Solves the problem of a model: columns of each class, then the choice for each unit; also for other budgets."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

from holdfast.activations.profile.solved_plan import CurvePoint, SolvedPlan
from holdfast.activations.profile.unit_profile import ModelProfile, UnitColumn
from holdfast.activations.solve.columns import columns_of
from holdfast.activations.solve.master import choose, chosen_columns, least_peak
from holdfast.activations.solve.timeline import step_peak
from holdfast.errors import InvalidError, shown_bytes

RESERVE = 0.005
"""Share of the budget that stays free, at least: predicted peaks are wrong by a part of a percent."""

CURVE_BUDGETS = 12
"""Budgets of the curve of a plan."""


def all_columns(profile: ModelProfile, error_bound: float) -> tuple[tuple[UnitColumn, ...], ...]:
    """Return the columns of each class.

    Raises:
        InvalidError: scipy is missing.
    """
    return tuple(columns_of(unit, error_bound) for unit in profile.classes)


def solve(
    profile: ModelProfile,
    columns: Sequence[Sequence[UnitColumn]],
    budget_bytes: int,
    *,
    error_bound: float = 0.0,
    reserve: float = RESERVE,
) -> SolvedPlan:
    """Return the plan of least time within a budget.

    Args:
        profile: The measured model.
        columns: Columns of each class, with measured seconds where a fit has measured.
        budget_bytes: Most bytes that a step may take above the memory that the job holds before
            the step.
        error_bound: The bound that the columns were made for.
        reserve: Share of the budget that stays free.
    Raises:
        InvalidError: No choice fits the budget, or scipy is missing.
    """
    choice = choose(profile, columns, floor(budget_bytes * (1 - reserve)))
    if choice is None and reserve <= RESERVE:
        # The measured peak decides about a budget that the reserve alone exceeds, and about keeping everything.
        reserve = 0.0
        choice = choose(profile, columns, ceil(budget_bytes * (1 + 1e-5)))
        if choice is None and budget_bytes >= profile.keep_all_peak_bytes:
            choice = (0,) * len(profile.order)
    if choice is None:
        raise _too_small(profile, columns, budget_bytes, error_bound, reserve)
    chosen = chosen_columns(profile, columns, choice)
    return SolvedPlan(
        profile=profile,
        columns=tuple(tuple(each) for each in columns),
        choice=choice,
        budget_bytes=budget_bytes,
        reserve=reserve,
        error_bound=error_bound,
        predicted_peak_bytes=step_peak(profile, chosen, is_full=False).bytes,
        predicted_slowdown=1 + sum(column.seconds for column in chosen) / profile.step_seconds,
    )


def solve_again(plan: SolvedPlan, budget_bytes: int) -> SolvedPlan:
    """Return a plan for another budget, from the profile and the columns of a plan.

    Raises:
        InvalidError: No choice fits the budget, or scipy is missing.
    """
    return solve(plan.profile, plan.columns, budget_bytes, error_bound=plan.error_bound, reserve=plan.reserve)


def least_budget(peak_bytes: int, reserve: float) -> int:
    """Return the least budget whose memory without the reserve holds a peak."""
    budget = int(peak_bytes / (1 - reserve) * (1 + 5e-6))
    return budget + 2


def curve_of(plan: SolvedPlan) -> tuple[CurvePoint, ...]:
    """Return the curve from the least feasible budget up to the fastest plan, smallest peak first.

    Budgets with the same plan give one point.

    Raises:
        InvalidError: scipy is missing.
    """
    profile, columns = plan.profile, plan.columns
    least = least_budget(least_peak(profile, columns).bytes, 0.0)
    fastest = chosen_columns(profile, columns, [0] * len(profile.order))
    step = max(least_budget(step_peak(profile, fastest).bytes, 0.0) - least, 0) / (CURVE_BUDGETS - 1)
    budgets = (least + int(number * step) for number in range(CURVE_BUDGETS))
    plans = (solve(profile, columns, budget, error_bound=plan.error_bound, reserve=0.0) for budget in budgets)
    points = {CurvePoint(each.predicted_peak_bytes, each.predicted_slowdown) for each in plans}
    return tuple(sorted(points, key=lambda each: (each.peak_bytes, each.slowdown)))


def _too_small(
    profile: ModelProfile,
    columns: Sequence[Sequence[UnitColumn]],
    budget_bytes: int,
    error_bound: float,
    reserve: float,
) -> InvalidError:
    peak = least_peak(profile, columns)
    name, kind = profile.order[peak.unit]
    least = least_budget(peak.bytes, reserve)
    why_not = profile.classes[kind].why_not
    fixed = f"; {name} is never recomputed: {why_not}" if why_not else ""
    bounded = "" if error_bound else ", or fit with error_bound=0.02, which may need less"
    return InvalidError(
        f"budget is {budget_bytes:,} bytes ({shown_bytes(budget_bytes)}); expected at least {least:,} bytes "
        f"({shown_bytes(least)}): the {peak.phase} of {name} needs them{fixed}. Pass a larger budget or smaller "
        f"batches{bounded}"
    )
