"""How much longer a step takes within a budget, beside the rivals: plans with exact gradients, and within a bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.activations.models import Training
from bench.activations.race import AGAIN, KEEP, Race
from bench.part import Measured, Params, Part, Round, Spread, contenders, present, spread_of, spreads_of
from holdfast.activations.plan import ActivationPlan
from holdfast.errors import InvalidError

SHARES = (62, 42)
"""Budgets of new fits, in percent of the peak of plain training. Two more have the peaks of two rivals."""

OTHER_SHARES = (90, 80, 70, 50, 35)
"""Budgets that are solved from the measurements of a fit."""

BOUNDED = {"e02_at_42": (0.02, 42), "e25_at_38": (0.25, 38)}
"""Error bound, and budget in percent."""


def measure(root: Path, params: Params, *, kind: str) -> Measured:
    """Race plans of exact gradients against all rivals."""
    race = Race(Training(kind, params))
    notes = race.add_rivals()
    budgets = {f"ours_{share}": share * race.keep_all_bytes // 100 for share in SHARES}
    budgets |= {f"ours_as_{name}": race.ways[name].peak_bytes for name in ("selective", "full")}
    steps = [_fit(race, name, budget, 0.0, notes) for name, budget in budgets.items()]
    plans = [way.plan for way in race.ways.values() if way.plan is not None]
    for share in OTHER_SHARES if plans else ():
        _solve(race, plans[0], share, notes)
    facts = {"fit_steps": float(max(steps))}
    return Measured([{**each, **facts} for each in race.rounds(params["rounds"])], notes)


def measure_bounded(root: Path, params: Params) -> Measured:
    """Race plans of bounded errors against plain training and full checkpointing."""
    race = Race(Training("gpt", params))
    notes = race.add_rivals("full")
    for name, (bound, share) in BOUNDED.items():
        _fit(race, f"ours_{name}", share * race.keep_all_bytes // 100, bound, notes)
    facts = {
        f"error_per_bound_{name}": race.ways[f"ours_{name}"].gradients_error / bound
        for name, (bound, _) in BOUNDED.items()
        if f"ours_{name}" in race.ways
    }
    return Measured([{**each, **facts} for each in race.rounds(params["rounds"])], notes)


def _fit(race: Race, name: str, budget_bytes: int, error_bound: float, notes: list[str]) -> int:
    """Add a plan of a new fit; return the steps of the fit, 0 if the budget is refused."""
    try:
        return race.fitted(name, budget_bytes, error_bound=error_bound)
    except InvalidError as error:
        notes.append(f"{name}: {error}")
        return 0


def _solve(race: Race, plan: ActivationPlan, share: int, notes: list[str]) -> None:
    """Add a plan for another budget."""
    try:
        race.add_plan(f"ours_{share}", plan.resolve(budget=share * race.keep_all_bytes // 100))
    except InvalidError as error:
        notes.append(f"ours_{share}: {error}")


def overhead(each: Round, name: str) -> float:
    """Return the share of a step that a way adds in a round."""
    return 2 * each[name] / (each[KEEP] + each[AGAIN]) - 1


def values(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the ratios of each round, of the ways that were measured."""
    ways = {"overhead_e0_at_62": "ours_62", "overhead_e0_at_42": "ours_42", "overhead_e0_at_full_peak": "ours_as_full"}
    ways |= {f"overhead_{name}": f"ours_{name}" for name in BOUNDED}
    found = {
        key: [overhead(each, name) / overhead(each, "full") for each in rounds]
        for key, name in ways.items()
        if present(rounds, name)
    }
    if present(rounds, "ours_as_selective"):
        found["slowdown_vs_sac"] = [each["ours_as_selective"] / each["selective"] for each in rounds]
    return found


def slowdown_errors(rounds: Sequence[Round]) -> dict[str, float]:
    """Return for each plan the difference of the predicted and of the measured slowdown."""
    predicted = "predicted_slowdown_"
    return {
        name: abs(rounds[0][predicted + name] - 1 - statistics.median(overhead(each, name) for each in rounds))
        for name in (each.removeprefix(predicted) for each in contenders(rounds, predicted))
    }


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the same over all rounds, and the errors of the predictions."""
    errors = sorted(slowdown_errors(rounds).values())
    worst = errors[-1] if len(errors) < 2 else statistics.quantiles(errors, n=20, method="inclusive")[-1]
    again = [abs(each[AGAIN] / each[KEEP] - 1) for each in rounds]
    return {
        **spreads_of(values(rounds, params)),
        "slowdown_error_p95": Spread(worst, errors[0], errors[-1]),
        "slowdown_error_of_plain": spread_of(again),
        "fit_steps": spread_of([each["fit_steps"] for each in rounds]),
    }


def values_of_modern(rounds: Sequence[Round], params: Params) -> dict[str, list[float]]:
    """Return the ratios of the second model."""
    return {f"{key}_modern": each for key, each in values(rounds, params).items()}


def keys_of_modern(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the keys of the second model."""
    return {f"{key}_modern": spread for key, spread in keys(rounds, params).items()}


def keys_of_bounded(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the keys of plans within a bound."""
    found = spreads_of(values(rounds, params))
    errors = [rounds[0][name] for name in contenders(rounds, "error_per_bound_")]
    return found | ({"gradient_error_per_bound": Spread(max(errors), min(errors), max(errors))} if errors else {})


GPT = {"width": 1024, "blocks": 8, "tokens": 256}
# A processor without instructions for bfloat16 multiplies it at a tenth of the speed.
MODERN = {"width": 256, "blocks": 8, "tokens": 256}
QUICK = {"width": 256, "blocks": 4, "tokens": 128}

EXACT = Part(
    name="exact",
    question="How much longer does a step take within a budget, with gradients equal to the bit?",
    ranks=1,
    full={**GPT, "rounds": 7},
    quick={**QUICK, "rounds": 3},
    measure=partial(measure, kind="gpt"),
    keys=keys,
    values=values,
)

EXACT_MODERN = replace(
    EXACT,
    name="exact_modern",
    question="How much longer does it take with RMSNorm, SwiGLU, grouped heads and autocast?",
    full={**MODERN, "rounds": 7},
    quick={**QUICK, "tokens": 64, "rounds": 3},
    measure=partial(measure, kind="modern"),
    keys=keys_of_modern,
    values=values_of_modern,
)

WITHIN_BOUND = replace(
    EXACT,
    name="bounded",
    question="How much longer does it take with errors within a bound?",
    full={**GPT, "rounds": 9},
    measure=measure_bounded,
    keys=keys_of_bounded,
)
