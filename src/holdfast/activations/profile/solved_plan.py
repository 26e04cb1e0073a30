"""A plan: the measured model, the columns of its classes, and the column of each unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from holdfast.activations.profile.unit_profile import Bytes, ModelProfile, Seconds, UnitColumn


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a budget gives."""

    peak_bytes: Bytes
    """Predicted peak of a step."""
    slowdown: Seconds
    """Predicted time of a step divided by the time of a step that keeps everything."""


@dataclass(frozen=True, slots=True)
class SolvedPlan:
    """A column for each unit, and all that a solution for another budget needs."""

    profile: ModelProfile
    """The measured model."""
    columns: tuple[tuple[UnitColumn, ...], ...]
    """Columns of each class."""
    choice: tuple[int, ...]
    """For each unit in forward order: the index of a column of the unit's class."""
    budget_bytes: Bytes
    """Most bytes that a step may take above the memory that the job holds before the step."""
    reserve: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    """Share of the budget that the solver leaves free."""
    error_bound: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Largest error of a stored element, relative to the rms of its tensor; 0 for exact gradients."""
    predicted_peak_bytes: Bytes
    """Peak of a step, from the profile."""
    predicted_slowdown: Seconds
    """Time of a step divided by the time of a step that keeps everything."""
    measured_peak_bytes: Bytes = 0
    """Peak of a step that the fit measured under the plan; 0 for a plan that was solved without the model."""
    measured_slowdown: Seconds = 0.0
    """Time of that step divided by the time of a step that keeps everything; 0 if not measured."""
    gradient_errors: tuple[tuple[str, Seconds], ...] = ()
    """Parameters, each with the relative error of the gradient in that step; "" stands for all gradients as one. Empty
    for exact gradients, or if not measured."""
    curve: tuple[CurvePoint, ...] = ()
    """The plans of other budgets, smallest peak first. A plan in a file has the curve."""

    @property
    def is_measured(self) -> bool:
        """Return whether the seconds of all chosen columns are measured."""
        return all(self.column_of(unit).is_measured for unit in range(len(self.choice)))

    def column_of(self, unit: int) -> UnitColumn:
        """Return the column that was chosen for a unit, by its position in forward order."""
        return self.columns[self.profile.order[unit][1]][self.choice[unit]]
