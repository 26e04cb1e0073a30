"""Chooses a column for each unit of the model: least time, within the memory that each moment of a step has."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from holdfast.activations.profile.unit_profile import ModelProfile, UnitColumn
from holdfast.activations.solve.mixed_program import MixedProgram
from holdfast.activations.solve.timeline import StepMoment, may_overflow, overflow_bytes, step_peak

GAP = 1e-3
"""Gap at which the solver stops, relative to the added time and `STEP_SHARE` of a step."""

STEP_SHARE = 0.1
"""Share of a step that the gap counts too. A budget near the peak of keeping everything adds almost no time: a
thousandth of that time takes the solver 20 seconds and changes no step by a millionth."""

SECONDS_MAX = 30.0
"""Time limit of the solver."""

_TIE = 1e-7
"""Cost of an index relative to the slowest column: of two equal columns the first one is chosen."""

_TOLERANCE = 4e-6
"""Share of the memory that covers the solver's tolerance of 10⁻⁶ a row: three rows can add up."""


def choose(profile: ModelProfile, columns: Sequence[Sequence[UnitColumn]], memory_bytes: int) -> tuple[int, ...] | None:
    """Return the column of each unit; None if no choice fits.

    If the solver finds nothing in its time, the choice of the least memory is taken.

    Args:
        profile: The measured model.
        columns: Columns of each class.
        memory_bytes: Most bytes at any moment of a step.
    """
    free = memory_bytes - profile.outside_bytes
    if free <= 0:
        return None
    if (choice := _solved(profile, columns, scale=free)) is not None:
        return choice
    least = _least_choice(profile, columns)
    return least if step_peak(profile, chosen_columns(profile, columns, least)).bytes <= memory_bytes else None


def least_peak(profile: ModelProfile, columns: Sequence[Sequence[UnitColumn]]) -> StepMoment:
    """Return the peak of the choice that needs the least memory, to a thousandth."""
    return step_peak(profile, chosen_columns(profile, columns, _least_choice(profile, columns)))


def chosen_columns(
    profile: ModelProfile, columns: Sequence[Sequence[UnitColumn]], choice: Sequence[int]
) -> tuple[UnitColumn, ...]:
    """Return the column of each unit in forward order."""
    return tuple(columns[kind][index] for (_, kind), index in zip(profile.order, choice, strict=True))


def _least_choice(profile: ModelProfile, columns: Sequence[Sequence[UnitColumn]]) -> tuple[int, ...]:
    choice = _solved(profile, columns, scale=max(profile.keep_all_peak_bytes, 1), is_peak_variable=True)
    if choice is not None:
        return choice
    smallest = [min(range(len(each)), key=lambda index: each[index].device_bytes) for each in columns]
    return tuple(smallest[kind] for _, kind in profile.order)


def _sum(program: MixedProgram, terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return a new variable that equals a sum, as the one term of later rows."""
    variable = program.variable(upper=inf, is_whole=False)
    program.row([(variable, 1.0), *((each, -factor) for each, factor in terms)], least=0, most=0)
    return [(variable, 1.0)]


def _solved(
    profile: ModelProfile, columns: Sequence[Sequence[UnitColumn]], *, scale: int, is_peak_variable: bool = False
) -> tuple[int, ...] | None:
    """Return the column of each unit; None if the solver found none. Bytes are in units of `scale`.

    The stored bytes after each unit are variables: rows over all earlier units are dense.

    Args:
        profile: The measured model.
        columns: Columns of each class.
        scale: Bytes that every moment may take outside `outside_bytes`, if the peak is no variable.
        is_peak_variable: Minimise the peak instead of the time.
    """
    program = MixedProgram()
    choices: list[list[int]] = []
    peak = [(program.variable(1.0, inf, is_whole=False), -1.0)] if is_peak_variable else []
    room = 0.0 if is_peak_variable else 1.0 - _TOLERANCE
    slowest = max((column.seconds for each in columns for column in each), default=0.0) or 1.0
    if not is_peak_variable:
        program.row([(program.variable(STEP_SHARE * profile.step_seconds / slowest), 1)], least=1)
    before: list[tuple[int, float]] = []
    casts: list[tuple[int, float]] = []
    for unit, (_, kind) in enumerate(profile.order):
        options, gradients = columns[kind], profile.gradient_bytes[unit] / scale
        costs = [0.0 if is_peak_variable else each.seconds / slowest + _TIE * at for at, each in enumerate(options)]
        variables = [program.variable(cost) for cost in costs]
        choices.append(variables)
        program.row([(variable, 1.0) for variable in variables], least=1, most=1)
        device, forward, backward, cast = (
            [
                (variable, getattr(each, f"{name}_bytes") / scale)
                for variable, each in zip(variables, options, strict=True)
            ]
            for name in ("device", "forward_workspace", "backward_workspace", "forward_cast")
        )
        after = _sum(program, [*before, *device])
        program.row([*before, *casts, *forward, *peak], most=room)
        if any(size for _, size in cast):
            casts = _sum(program, [*casts, *cast])
        program.row([*after, *backward, *peak], most=room - gradients)
        # The gradients count only where a pack was chosen: without one the row must not bind.
        overflow = overflow_bytes(profile.classes[kind]) / scale + gradients
        packs = [(variable, overflow) for variable, each in zip(variables, options, strict=True) if may_overflow(each)]
        if packs:
            program.row([*before, *packs, *peak], most=room)
        before = after
    program.row([*before, *casts, *peak], most=room - profile.loss_workspace_bytes / scale)
    values = program.minimum(gap=GAP, seconds=SECONDS_MAX)
    return None if values is None else tuple(int(np.argmax(values[each])) for each in choices)
