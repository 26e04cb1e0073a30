"""Mixed integer linear programs, solved by HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import InvalidError


@dataclass(slots=True)
class MixedProgram:
    """Variables with costs, and rows that bound sums of variables. Every variable is at least 0."""

    costs: list[float] = field(default_factory=list)
    """Cost of each variable."""
    uppers: list[float] = field(default_factory=list)
    """Upper bound of each variable."""
    whole: list[bool] = field(default_factory=list)
    """Whether each variable is an integer."""
    least: list[float] = field(default_factory=list)
    """Lower bound of each row."""
    most: list[float] = field(default_factory=list)
    """Upper bound of each row."""
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    """Row, variable, coefficient."""

    def variable(self, cost: float = 0.0, upper: float = 1.0, *, is_whole: bool = True) -> int:
        """Return the index of a new variable."""
        self.costs.append(cost)
        self.uppers.append(upper)
        self.whole.append(is_whole)
        return len(self.costs) - 1

    def row(self, terms: Iterable[tuple[int, float]], *, least: float = -inf, most: float = inf) -> int:
        """Return the index of a new row: least ≤ Σ coefficient × variable ≤ most."""
        self.entries.extend((len(self.least), variable, coefficient) for variable, coefficient in terms)
        self.least.append(least)
        self.most.append(most)
        return len(self.least) - 1

    def minimum(
        self, *, gap: float, seconds: float, costs: Sequence[float] | None = None
    ) -> NDArray[np.float64] | None:
        """Return the values of all variables at the least cost; None without a solution, or if the time was too short.

        Args:
            gap: Relative gap at which the solver stops.
            seconds: Time limit.
            costs: Other costs; None: those of the variables.
        Raises:
            InvalidError: scipy is missing.
        """
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise InvalidError("activations need scipy; run: pip install 'holdfast[activations]'") from error
        rows, columns, values = (np.array(each) for each in zip(*self.entries, strict=True))
        matrix = csr_array((values, (rows, columns)), shape=(len(self.least), len(self.costs)))
        found = milp(
            np.array(self.costs if costs is None else costs),
            integrality=np.array(self.whole, dtype=np.uint8),
            bounds=Bounds(0, np.array(self.uppers)),
            constraints=LinearConstraint(matrix, np.array(self.least), np.array(self.most)),
            options={"mip_rel_gap": gap, "time_limit": seconds},
        )
        return None if found.x is None else np.where(self.whole, np.round(found.x), found.x)
