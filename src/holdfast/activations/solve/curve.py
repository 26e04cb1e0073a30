"""The curve of a plan: the peak and the slowdown of several budgets, from the least feasible one upwards."""

from __future__ import annotations

from holdfast.activations.profile.solved_plan import CurvePoint, SolvedPlan
from holdfast.activations.solve.master import chosen_columns, least_peak
from holdfast.activations.solve.solve import least_budget, solve
from holdfast.activations.solve.timeline import step_peak

CURVE_BUDGETS = 12


def curve_of(plan: SolvedPlan) -> tuple[CurvePoint, ...]:
    """Return the curve up to the fastest plan, smallest peak first. Budgets with the same plan give one point.

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
