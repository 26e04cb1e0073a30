"""Policies for `CheckpointManager(root, save=…, keep=…)`: when to save a step, and which steps to keep.

Small values that combine: `AnyOf(EveryNSteps(100), OnRequest())`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import InvalidError

__all__ = [
    "EveryNSteps",
    "EverySeconds",
    "AtSteps",
    "OnRequest",
    "LatestN",
    "EveryNth",
    "BestN",
    "NewestPer",
    "Tagged",
    "AnyOf",
    "AllOf",
    "SavePolicy",
    "KeepPolicy",
]


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save each step that `n` divides."""

    n: int
    """Number of steps from one save to the next."""

    def __post_init__(self) -> None:
        _require_count("EveryNSteps", "n", self.n)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save began, or since the loop began."""

    seconds: float
    """Seconds on the monotonic clock."""

    def __post_init__(self) -> None:
        seconds: object = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise InvalidError(f"EverySeconds(seconds={seconds!r}): expected a positive, finite number of seconds")


@dataclass(frozen=True, slots=True, init=False)
class AtSteps:
    """Save exactly these steps."""

    steps: frozenset[int]
    """The steps."""

    def __init__(self, *steps: int) -> None:
        for step in steps:
            if type(step) is not int or step < 0:
                raise InvalidError(f"AtSteps({step!r}): expected steps as whole numbers, as in AtSteps(100, 1000)")
        if not steps:
            raise InvalidError("AtSteps(): expected at least one step, as in AtSteps(100, 1000)")
        object.__setattr__(self, "steps", frozenset(steps))


@dataclass(frozen=True, slots=True)
class OnRequest:
    """Save soon after any rank has called `request_save`."""


@dataclass(frozen=True, slots=True)
class LatestN:
    """Keep the newest `n` steps."""

    n: int
    """How many."""

    def __post_init__(self) -> None:
        _require_count("LatestN", "n", self.n)


@dataclass(frozen=True, slots=True)
class EveryNth:
    """Keep each step that `n` divides."""

    n: int
    """Number of steps from one kept step to the next."""

    def __post_init__(self) -> None:
        _require_count("EveryNth", "n", self.n)


@dataclass(frozen=True, slots=True)
class BestN:
    """Keep the `n` steps with the best value of a metric. Steps without a finite value are not ranked."""

    n: int
    """How many."""

    metric: str
    """Name of the metric, as given to `save` or `maybe_save`."""

    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is best. Of equal values the newer step is better."""

    def __post_init__(self) -> None:
        _require_count("BestN", "n", self.n)
        _require_name(self.metric)
        if self.mode not in ("min", "max"):
            raise InvalidError(f"BestN(mode={self.mode!r}): expected 'min' or 'max'")


@dataclass(frozen=True, slots=True)
class NewestPer:
    """Keep the newest step of each hour or day, in UTC, by the creation time of steps."""

    period: Literal["hour", "day"]
    """Length of a period."""

    def __post_init__(self) -> None:
        if self.period not in ("hour", "day"):
            raise InvalidError(f"NewestPer({self.period!r}): expected 'hour' or 'day'")


@dataclass(frozen=True, slots=True)
class Tagged:
    """Keep every step that has a tag."""


@dataclass(frozen=True, slots=True, init=False)
class AnyOf:
    """Save or keep if at least one of several policies does. All of them say when to save, or all what to keep."""

    policies: tuple[SavePolicy | KeepPolicy, ...]
    """The policies."""

    def __init__(self, *policies: SavePolicy | KeepPolicy) -> None:
        object.__setattr__(self, "policies", _several("AnyOf", policies))


@dataclass(frozen=True, slots=True, init=False)
class AllOf:
    """Save or keep if every one of several policies does. All of them say when to save, or all what to keep."""

    policies: tuple[SavePolicy | KeepPolicy, ...]
    """The policies."""

    def __init__(self, *policies: SavePolicy | KeepPolicy) -> None:
        object.__setattr__(self, "policies", _several("AllOf", policies))
        self._require_possible()

    def _require_possible(self) -> None:
        listed = [policy.steps for policy in self.policies if isinstance(policy, AtSteps)]
        periods = [policy.n for policy in self.policies if isinstance(policy, EveryNSteps)]
        if listed and not any(all(step % n == 0 for n in periods) for step in frozenset.intersection(*listed)):
            raise InvalidError(f"{self}: no step is all of that, so nothing would ever be saved; expected AnyOf?")


SavePolicy = EveryNSteps | EverySeconds | AtSteps | OnRequest | AnyOf | AllOf
"""When to save."""

KeepPolicy = LatestN | EveryNth | BestN | NewestPer | Tagged | AnyOf | AllOf
"""What to keep."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a run."""

    save: SavePolicy | None = None
    """When `maybe_save` saves; None if it never does."""

    keep: KeepPolicy | None = None
    """Which steps are kept; None for all."""


SAVE_RULES = (EveryNSteps, EverySeconds, AtSteps, OnRequest)
"""Policies of when to save, without combinations."""

KEEP_RULES = (LatestN, EveryNth, BestN, NewestPer, Tagged)
"""Policies of what to keep, without combinations."""


def rules_of(policy: object) -> Iterator[object]:
    """Yield the policies in a combination, at every depth."""
    if isinstance(policy, AnyOf | AllOf):
        for inner in policy.policies:
            yield from rules_of(inner)
    else:
        yield policy


def _several(name: str, policies: tuple[SavePolicy | KeepPolicy, ...]) -> tuple[SavePolicy | KeepPolicy, ...]:
    if not policies:
        raise InvalidError(f"{name}(): expected at least one policy")
    rules = [rule for policy in policies for rule in rules_of(policy)]
    for rule in rules:
        if not isinstance(rule, SAVE_RULES + KEEP_RULES):
            raise InvalidError(f"{name}: {str(rule)[:80]!r} is {type(rule).__name__}; expected policies")
    saves = [rule for rule in rules if isinstance(rule, SAVE_RULES)]
    keeps = [rule for rule in rules if isinstance(rule, KEEP_RULES)]
    if saves and keeps:
        raise InvalidError(
            f"{name}: {saves[0]} says when to save and {keeps[0]} what to keep; expected policies of one kind. "
            "Give the first as save= and the second as keep="
        )
    return tuple(policies)


def _require_count(policy: str, name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidError(f"{policy}({name}={value!r}): expected a positive whole number")


def _require_name(metric: object) -> None:
    if not isinstance(metric, str) or not metric:
        raise InvalidError(f"BestN(metric={metric!r}): expected the name of a metric, such as 'loss'")
