"""Predicted and measured peaks of plans: one column for all units, columns at random, and solved for budgets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.activations.models import Training
from bench.activations.race import Race
from bench.activations.slowdowns import GPT, MODERN, QUICK
from bench.part import Measured, Params, Part, Round, Spread
from holdfast.activations.plan import ActivationPlan
from holdfast.activations.solve.master import chosen_columns
from holdfast.activations.solve.timeline import step_peak
from holdfast.errors import InvalidError

FIT_SHARE, SHARES = 95, (90, 85, 75, 65, 55, 50, 45)
"""Budgets in percent of the peak of plain training: of the fit, and of plans from its measurements."""


def measure(root: Path, params: Params) -> Measured:
    """Measure the plans of both models; a round is a plan."""
    rounds: list[Round] = []
    notes: list[str] = []
    for kind in ("gpt", "modern"):
        sizes = {name: params[f"{kind}_{name}"] for name in GPT}
        race = Race(Training(kind, sizes))
        race.fitted("fit", FIT_SHARE * race.keep_all_bytes // 100)
        first = race.ways["fit"].plan
        assert first is not None, "a fit gives a plan"
        for name, plan in _plans(first, race.keep_all_bytes, params["plans"], notes):
            race.add_plan(name, plan)
            budget = 0 if plan.solved.budget_bytes == first.solved.budget_bytes else plan.solved.budget_bytes
            measured = race.ways.pop(name).peak_bytes
            rounds.append(
                {
                    f"predicted_{kind}": plan.solved.predicted_peak_bytes,
                    f"measured_{kind}": measured,
                    "error": abs(plan.solved.predicted_peak_bytes / measured - 1),
                    "over": float(0 < budget < measured),
                }
            )
    return Measured(rounds, notes)


def _plans(
    first: ActivationPlan, keep_all_bytes: int, count: int, notes: list[str]
) -> Iterator[tuple[str, ActivationPlan]]:
    """Yield plans: a third with one column for all units, a third with drawn columns, a third for budgets."""
    solved, rng = first.solved, random.Random(0)
    order = [kind for _, kind in solved.profile.order]
    choices = [
        [at * (len(solved.columns[kind]) - 1) // max(count // 3 - 1, 1) for kind in order] for at in range(count // 3)
    ]
    choices += [[rng.randrange(len(solved.columns[kind])) for kind in order] for _ in range(count // 3)]
    for number, choice in enumerate(choices):
        columns = chosen_columns(solved.profile, solved.columns, choice)
        predicted = step_peak(solved.profile, columns).bytes
        yield f"choice_{number}", ActivationPlan(replace(solved, choice=tuple(choice), predicted_peak_bytes=predicted))
    for share in SHARES[: count - len(choices)]:
        try:
            yield f"budget_{share}", first.resolve(budget=share * keep_all_bytes // 100)
        except InvalidError as error:
            notes.append(f"{share} %: {error}")


def keys(rounds: Sequence[Round], params: Params) -> dict[str, Spread]:
    """Return the worst error of a prediction, and the number of plans above their budgets."""
    errors, over = [each["error"] for each in rounds], sum(each["over"] for each in rounds)
    return {"peak_error_worst": Spread(max(errors), min(errors), max(errors)), "over_budget": Spread(over, over, over)}


def _sizes(kind: str, sizes: Params) -> Params:
    return {f"{kind}_{name}": size for name, size in sizes.items()}


PART = Part(
    name="peaks",
    question="How exact are predicted peaks?",
    ranks=1,
    full={**_sizes("gpt", GPT), **_sizes("modern", MODERN), "plans": 21},
    quick={**_sizes("gpt", QUICK), **_sizes("modern", {**QUICK, "tokens": 64}), "plans": 6},
    measure=measure,
    keys=keys,
)
