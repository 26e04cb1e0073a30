"""A plan as text: the tensors that each group of units stores, packs and makes again, and the peak."""

from __future__ import annotations

from collections import Counter

from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import UnitColumn, UnitProfile
from holdfast.activations.solve.master import chosen_columns
from holdfast.activations.solve.timeline import step_peak
from holdfast.errors import first_three, printable, shown_bytes


def explained(plan: SolvedPlan) -> str:
    """Return a plan for people: the prediction, then each class with the columns that its units use."""
    profile = plan.profile
    peak = step_peak(profile, chosen_columns(profile, plan.columns, plan.choice))
    share = 100 * plan.predicted_peak_bytes / max(profile.keep_all_peak_bytes, 1)
    lines = [
        f"budget {shown_bytes(plan.budget_bytes)}: predicted peak {shown_bytes(plan.predicted_peak_bytes)} "
        f"({share:.0f} % of keeping everything), step time × {plan.predicted_slowdown:.3f}",
        f"the peak is in the {peak.phase} of {printable(profile.order[peak.unit][0])}",
    ]
    uses = Counter(zip((kind for _, kind in profile.order), plan.choice, strict=True))
    for kind, unit in enumerate(profile.classes):
        names = [printable(name) for name, each in profile.order if each == kind]
        lines.append(f"{len(names)} units ({first_three(names)}):")
        lines += [
            f"  {uses[kind, index]} × {_line(unit, plan.columns[kind][index])}"
            for index in range(len(plan.columns[kind]))
            if uses[kind, index]
        ]
        if not unit.is_replayable:
            lines.append(f"  never recomputed: {printable(unit.why_not)}")
    return "\n".join(lines)


def _line(unit: UnitProfile, column: UnitColumn) -> str:
    kept = sum(unit.ops[number].bytes for number, action in column.store if action == "keep")
    packed = [f"{printable(action)} {_name(unit, number)}" for number, action in column.store if action != "keep"]
    again = [_name(unit, number) for number in column.run if unit.ops[number].base is None]
    draws = f", {len(column.draw)} only for the draw" if column.draw else ""
    parts = [f"stores {shown_bytes(column.device_bytes)} ({shown_bytes(kept)} kept)"]
    parts += [f"packs {first_three(packed)}"] if packed else []
    parts += [f"runs again {first_three(again)}{draws}; skips {_skipped(unit, column)} ops"] if again else []
    return f"{'; '.join(parts)}; {1e3 * column.seconds:.2f} ms"


def _skipped(unit: UnitProfile, column: UnitColumn) -> int:
    handled = {*dict(column.store), *column.run, *column.draw}
    return sum(op.base is None and op.number not in handled for op in unit.ops[1:])


def _name(unit: UnitProfile, number: int) -> str:
    return printable(f"{unit.ops[number].overload}#{number}")
