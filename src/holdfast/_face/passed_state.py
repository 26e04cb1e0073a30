"""The arguments of a call that saves a step of a run."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast._face.arguments import Globs, TagNames, require_save_arguments, selection_of
from holdfast.base.ports.framework import Selection
from holdfast.errors import InvalidError
from holdfast.training.runs.step_request import StepState


def passed_state(
    step: object,
    state: Mapping[str, object],
    call: str,
    chosen: tuple[Globs, Globs, bool],
    metrics: Mapping[str, object] | None,
    tags: tuple[TagNames, TagNames],
) -> StepState:
    """Return the arguments of a call that saves, or the error in the arguments: every rank then raises, or no rank."""
    try:
        require_save_arguments(step, state, call)
        return StepState(state, selection_of(*chosen), metrics, *tags)
    except InvalidError as misuse:
        return StepState({}, Selection(), misuse=misuse)
