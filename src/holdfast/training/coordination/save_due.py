"""Decides whether a step is saved: a pure function of values that are equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.policies import AllOf, AnyOf, AtSteps, EveryNSteps, EverySeconds, OnRequest, SavePolicy, rules_of

AHEAD_SECONDS = 1.0
"""How far ahead rank 0 announces, in time. Longer: other ranks wait less often. Shorter: a request is served sooner."""

AHEAD_CALLS_MAX = 64
"""How far ahead rank 0 announces at most, in calls: later steps may take much longer than the last ones."""


def needs_announcements(policy: SavePolicy) -> bool:
    """Return whether a policy depends on time or requests, which ranks cannot know equally by themselves."""
    return any(isinstance(rule, EverySeconds | OnRequest) for rule in rules_of(policy))


def is_due(policy: SavePolicy, step: int, announcement: Announcement, last_save: LastSave) -> bool:
    """Return whether a step is to be saved.

    Args:
        policy: When to save.
        step: The step.
        announcement: The announcement in force at the step.
        last_save: The last save before it.
    """
    if isinstance(policy, AnyOf | AllOf):
        combined = any if isinstance(policy, AnyOf) else all
        return combined(is_due(rule, step, announcement, last_save) for rule in policy.policies)  # type: ignore[arg-type]
    if isinstance(policy, EveryNSteps):
        return step % policy.n == 0
    if isinstance(policy, AtSteps):
        return step in policy.steps
    if isinstance(policy, EverySeconds):
        return last_save.seconds is not None and announcement.seconds - last_save.seconds >= policy.seconds
    # OnRequest: a save at the step of the request, or at a later one, fulfils it.
    requested = announcement.requested
    return requested is not None and (last_save.step is None or last_save.step < requested)


def next_until(step: int, until: int | None, strides: Sequence[int], call_seconds: Sequence[float]) -> int | None:
    """Return the last step that rank 0 should announce now, or None if its announcements reach far enough ahead.

    Args:
        step: The current step of rank 0.
        until: The last step announced; None if there is none.
        strides: Distances between the last calls of the loop, in steps.
        call_seconds: Distances between the same calls, in seconds.
    """
    # The slowest call and the shortest stride: announce too little rather than too much. An announcement holds one
    # time for all its steps, so one that reaches too far delays rules by time.
    stride = min(strides, default=1)
    slowest = max(call_seconds, default=AHEAD_SECONDS)
    calls = min(max(int(AHEAD_SECONDS / max(slowest, 1e-9)), 1), AHEAD_CALLS_MAX)
    if until is not None and 2 * (until - step) > calls * stride:
        return None
    return max(step + calls * stride, step if until is None else until + 1)


@dataclass(frozen=True, slots=True)
class LastSave:
    """The last save; equal on every rank after the same steps."""

    step: int | None = None
    """The last step whose save began, or that was loaded; None if there is none."""

    seconds: float | None = None
    """Time of rank 0 at the last save, or at the begin of the loop if there is none. None before the first
    announcement."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What rank 0 announces for the steps after those of the announcement before, up to `until`."""

    until: int
    """The last step it covers."""

    seconds: float
    """Monotonic time on rank 0. It counts as the time of every step covered."""

    requested: int | None = None
    """The latest step at which a rank requested a save, as far as rank 0 knows; None if none did."""

    last_save: LastSave | None = None
    """The last save as rank 0 knows it, from which every rank starts; only in the first announcement of a loop."""
