"""Whether a step is to be saved: a pure function of what every rank knows alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.policies import AllOf, AnyOf, AtSteps, EveryNSteps, EverySeconds, OnRequest, SavePolicy, rules_of

AHEAD_SECONDS = 1.0
"""How far rank 0 announces ahead, in time: ranks seldom wait for it then, and a request waits about as long."""

AHEAD_CALLS_MAX = 64
"""How far it announces ahead at most, in calls: steps may take much longer than those before them did."""


def needs_announcements(policy: SavePolicy) -> bool:
    """Return whether a policy asks for more than the step: for what ranks cannot know alike by themselves."""
    return any(isinstance(rule, EverySeconds | OnRequest) for rule in rules_of(policy))


def is_due(policy: SavePolicy, step: int, told: Announcement, standing: Standing) -> bool:
    """Return whether a step is to be saved.

    Args:
        policy: When to save.
        step: The step.
        told: The announcement in force.
        standing: What was saved last.
    """
    if isinstance(policy, AnyOf | AllOf):
        combined = any if isinstance(policy, AnyOf) else all
        return combined(is_due(each, step, told, standing) for each in policy.policies)  # type: ignore[arg-type]
    if isinstance(policy, EveryNSteps):
        return step % policy.n == 0
    if isinstance(policy, AtSteps):
        return step in policy.steps
    if isinstance(policy, EverySeconds):
        return standing.seconds is not None and told.seconds - standing.seconds >= policy.seconds
    # A save at the step of a request, or later, has what was asked for.
    return told.requested is not None and (standing.step is None or standing.step < told.requested)


def next_until(step: int, until: int | None, strides: Sequence[int], call_seconds: Sequence[float]) -> int | None:
    """Return up to which step rank 0 announces now, or None if what it announced reaches far enough.

    Args:
        step: Where rank 0 is.
        until: The last step announced; None if there is none.
        strides, call_seconds: How far the last calls were apart, in steps and in time.
    """
    # The slowest and the shortest: a loop that slows down must not have to come to the end of what was announced.
    stride = min(strides, default=1)
    slowest = max(call_seconds, default=AHEAD_SECONDS)
    calls = min(max(int(AHEAD_SECONDS / max(slowest, 1e-9)), 1), AHEAD_CALLS_MAX)
    if until is not None and 2 * (until - step) > calls * stride:
        return None
    return max(step + calls * stride, step if until is None else until + 1)


@dataclass(frozen=True, slots=True)
class Standing:
    """What was saved last; the same on every rank after the same steps."""

    step: int | None = None
    """The last step of which a save began, or that was loaded; None if there is none."""

    seconds: float | None = None
    """When a save last began, as the announcement in force said, or else when the loop did; None before its first step
    of which time was told."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What rank 0 tells every rank, ahead of the steps it is for: those after the one before it, up to `until`."""

    until: int
    """The last step it is for."""

    seconds: float
    """Monotonic time on rank 0, for these steps as if it stood still."""

    requested: int | None = None
    """The latest step at which a rank asked for a save, as far as rank 0 knows; None if none did."""

    standing: Standing | None = None
    """What rank 0 stood at, with which every rank begins; in the first announcement of a loop only."""
