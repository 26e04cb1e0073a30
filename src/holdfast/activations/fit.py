"""The order of a fit: measure the plain step, trace its units, solve, and check the planned step.

One linear function. A fit leaves gradients, buffers, generators and forwards as they were, also on an error or Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from holdfast.activations.plan import ActivationPlan, bytes_of
from holdfast.activations.profile.solved_plan import SolvedPlan
from holdfast.activations.profile.unit_profile import ModelProfile, UnitColumn
from holdfast.activations.profile.worst import MeasuredStep, worst_measured, worst_profile
from holdfast.activations.solve.solve import RESERVE, all_columns, solve
from holdfast.errors import InvalidError, printable, shown_bytes

if TYPE_CHECKING:
    from holdfast.activations.agree import FitRanks
    from holdfast.activations.runtime.measured_step import MeasuredModel

_Columns = tuple[tuple[UnitColumn, ...], ...]
"""Columns of each class."""

_Added = tuple[tuple[int, int, float], ...]
"""Class, index and seconds of columns."""

_STEPS_MAX = 32
"""Steps after which no further column is measured. The last measurement may take some more, and four check the plan."""

_TRIES = 4
"""Solutions whose peak is measured, before a budget counts as too small."""


def fit(
    model: Any,
    step: Callable[[], Any],
    *,
    budget: int | str,
    error_bound: float = 0.0,
    units: Sequence[str] | None = None,
    process_group: Any = None,
) -> ActivationPlan:
    """Measure a model, and return the plan of least time whose step stays within a budget.

    Loss and outputs under the plan equal those of the plain model to the bit. Gradients do where `error_bound` is 0,
    and the fit compares them. Above 0 the fit measures their errors.
    With several ranks a fit is collective: every rank calls `fit` for the same model, and holds the same plan.

    Example:
        def step():
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        plan = holdfast.activations.fit(model, step, budget="50%")
    Args:
        model: The model, a `torch.nn.Module` without gradients.
        step: Runs forward and backward once, on the same batch each time, and returns the loss, a tensor
            of one element. The step contains no optimizer.
        budget: The peak of a step above the memory that stands before it: bytes, "12GiB", or a share such as "40%" of
            the peak of keeping everything.
        error_bound: Largest error of an element that a pack may bring into backward, as a share of the rms of
            the tensor: 0.02 for codes of 8 bits, 0.25 for codes of 4. 0: gradients are exact.
        units: Globs of module names that are managed together, such as ["model.layers.*"]; None: the repeated blocks.
        process_group: The ranks that train the model: None for the default group (or one process), a group, or False
            for this process alone, whose step waits for no other rank. The smallest budget and bound of all count.
    Raises:
        InvalidError: A bad argument, a missing package, a step that does not repeat, a budget that no plan fits, or
            ranks that disagree.
        CheckpointError: Another rank failed; the message begins with the number of the rank.
        UnavailableError: A rank did not take part in time.
    """
    _require_package("torch", "torch")
    from holdfast.activations.agree import FitRanks
    from holdfast.activations.runtime.measured_step import MeasuredModel

    with FitRanks(process_group) as ranks:
        _require_package("scipy", "activations")
        _require_bound(error_bound)
        bytes_of(budget, 1 << 40)
        with MeasuredModel(model, step, units, error_bound, ranks.agree) as measured:
            return _fitted(ranks, measured, budget, error_bound)


def _fitted(ranks: FitRanks, measured: MeasuredModel, budget: int | str, error_bound: float) -> ActivationPlan:
    own = measured.profile()
    limits = ranks.gather((bytes_of(budget, own.keep_all_peak_bytes), float(error_bound)), tuple[int, float])
    limit, bound = map(min, zip(*limits, strict=True))
    gathered = ranks.gather(own, ModelProfile)
    profile = ranks.from_first(lambda: worst_profile(gathered), ModelProfile)
    columns = ranks.from_first(partial(all_columns, profile, bound), _Columns)
    reserve, found = RESERVE, 0
    for _ in range(_TRIES):
        while True:
            make = partial(solve, profile, columns, limit, error_bound=bound, reserve=reserve)
            solved = ranks.from_first(make, SolvedPlan)
            # Times of ops alone are too low: the chosen columns are measured until the choice stands.
            if solved.is_measured or measured.steps >= _STEPS_MAX:
                break
            slowest: dict[tuple[int, int], float] = {}
            for kind, index, seconds in chain(*ranks.gather(measured.added_seconds(solved), _Added)):
                slowest[kind, index] = max(slowest.get((kind, index), 0.0), seconds)
            columns = tuple(
                tuple(
                    replace(each, seconds=slowest[kind, index], is_measured=True) if (kind, index) in slowest else each
                    for index, each in enumerate(of)
                )
                for kind, of in enumerate(columns)
            )
        solved = worst_measured(solved, ranks.gather(measured.planned(solved), MeasuredStep))
        found = solved.measured_peak_bytes
        if found <= limit:
            return ActivationPlan(solved)
        # The excess is taken off the memory that the solver may use.
        reserve += max(found / limit - 1, RESERVE)
    raise InvalidError(
        f"budget is {shown_bytes(limit)}: the last plan took {shown_bytes(found)}, measured; expected a plan within "
        "the budget. Pass a larger budget or smaller batches"
    )


def _require_package(name: str, extra: str) -> None:
    try:
        import_module(name)
    except ImportError as error:
        raise InvalidError(f"activations.fit needs {name}; run: pip install 'holdfast[{extra}]'") from error


def _require_bound(error_bound: float) -> None:
    if type(error_bound) not in (int, float) or not 0 <= error_bound <= 1:
        raise InvalidError(
            f"error_bound={printable(repr(error_bound))[:80]}: expected a number from 0 (exact gradients) to 1. Pass a "
            "bound such as 0.02"
        )
