"""A plan for the activations of a model: explained, stored, solved for other budgets, and put to work."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.activations.plan_file import read_plan, write_plan
from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import BYTES_MAX
from holdfast.errors import InvalidError, printable, shown_bytes

if TYPE_CHECKING:
    from holdfast.activations.runtime.attach import AttachedUnits
    from holdfast.activations.solve.explain import PlanSummary

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]iB|%)", re.ASCII)
_POWERS = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}


def bytes_of(budget: object, keep_all_bytes: int) -> int:
    """Return a budget in bytes.

    Args:
        budget: A whole number of bytes, a text such as "12GiB", or a share such as "40%".
        keep_all_bytes: The peak of a step that keeps everything: 100 %.
    Raises:
        InvalidError: The budget is no such value, or 0.
    """
    expected = 'expected bytes as a whole number, "12GiB" or "40%"'
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise InvalidError(f"budget={budget!r}: {expected}. A float could be bytes or a share: pass a text")
    if isinstance(budget, int):
        found: float = budget
    else:
        match = _SIZE.fullmatch(budget.strip())
        if match is None:
            raise InvalidError(f"budget={printable(budget)[:80]!r}: {expected}")
        found = float(match[1]) * (keep_all_bytes / 100 if match[2] == "%" else _POWERS[match[2]])
    found = min(found, BYTES_MAX)
    if int(found) < 1:
        raise InvalidError(f"budget={budget!r}: {expected}, above 0")
    return int(found)


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """The treatment of every tensor that autograd needs, for one model within one budget."""

    solved: SolvedPlan
    """The measured model, its columns, and the column of each unit."""

    @property
    def measured_peak_bytes(self) -> int:
        """Peak of a step that the fit measured under the plan; 0 for a plan that was solved without the model."""
        return self.solved.measured_peak_bytes

    @property
    def measured_slowdown(self) -> float:
        """Time of that step divided by the time of a step that keeps everything; 0 if not measured."""
        return self.solved.measured_slowdown

    @property
    def gradient_errors(self) -> Mapping[str, float]:
        """Errors of the gradients of that step, relative to the plain gradient of the same parameter.

        The name "" stands for all gradients as one. Empty for exact gradients, or if not measured.
        """
        return dict(self.solved.gradient_errors)

    def explain(self) -> str:
        """Return the plan as text for people: peaks, times, and the treatment and price of each group of units.

        Example:
            print(plan.explain())
        """
        from holdfast.activations.solve.explain import explained

        return explained(self.summary())

    def summary(self) -> PlanSummary:
        """Return the content of `explain` as values: bytes, seconds, names of ops, and the curve of a plan from a file.

        Example:
            for use in plan.summary().uses:
                print(len(use.units), use.actions["kept"].bytes)
        """
        from holdfast.activations.solve.explain import summary_of

        return summary_of(self.solved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, with the curve of twelve budgets, each of which is solved now.

        Example:
            plan.save("plan.json")
        Raises:
            UnavailableError: The file cannot be written.
            InvalidError: scipy is missing, and the plan has no curve yet.
        """
        from holdfast.activations.solve.solve import curve_of

        write_plan(replace(self.solved, curve=self.solved.curve or curve_of(self.solved)), path)

    def resolve(self, *, budget: int | str) -> ActivationPlan:
        """Return a plan for another budget, from the measurements of this plan. Needs scipy, and no model.

        Example:
            smaller = plan.resolve(budget="30%")
        Raises:
            InvalidError: The budget is unreadable or too small, or scipy is missing.
        """
        from holdfast.activations.solve.solve import solve_again

        solved = solve_again(self.solved, bytes_of(budget, self.solved.profile.keep_all_peak_bytes))
        return ActivationPlan(replace(solved, curve=self.solved.curve))

    def apply(self, model: Any) -> ManagedActivations:
        """Put the plan to work on a model like the one that was fitted.

        The first call of each unit is traced, and compared with the plan. Apply and detach a plan between steps, never
        between a forward and its backward.

        Example:
            with plan.apply(model):
                train(model)
        Raises:
            InvalidError: The model lacks a unit of the plan, or a unit is managed already.
        """
        from holdfast.activations.runtime.attach import attach_plan

        return ManagedActivations(self, attach_plan(model, self.solved))


class ManagedActivations:
    """A model whose units follow a plan. A context manager, which detaches at its end."""

    def __init__(self, plan: ActivationPlan, attached: AttachedUnits) -> None:
        self._plan, self._attached = plan, attached

    def report(self) -> str:
        """Return peaks, slowdowns, bytes by action and the counts of calls so far, as text for people.

        Example:
            print(managed.report())
        """
        from holdfast.activations.solve.explain import bytes_by_action, predictions

        counts, summary = self._attached.counts, self._plan.summary()
        lines = [
            predictions(summary),
            bytes_by_action(summary),
            f"{counts.planned} calls as planned, {counts.other} of other signatures, {counts.overflows} overflows",
            "optimizer state that the first optimizer step makes is not in the budget",
        ]
        if (device := self._attached.device_peak()) is not None:
            lines.insert(1, f"most memory of the device so far: {shown_bytes(device)}, all tensors of the process")
        return "\n".join(lines)

    def detach(self) -> None:
        """Restore the plain forward of every unit.

        Example:
            managed.detach()
        """
        self._attached.detach()

    def __enter__(self) -> ManagedActivations:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Detach."""
        self.detach()


def load_plan(path: str | os.PathLike[str]) -> ActivationPlan:
    """Return the plan of a file. Needs neither torch nor scipy.

    Example:
        plan = holdfast.activations.load_plan("plan.json")
    Raises:
        MissingError: There is no file.
        CorruptError: The file is damaged, or is no plan.
        InvalidError: The plan is of a newer version.
    """
    return ActivationPlan(read_plan(path))
