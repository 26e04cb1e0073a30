"""Policies for `CheckpointManager(root, save=…, keep=…)`: when to save a step, and which steps to keep.

Small values that combine: `AnyOf(EveryNSteps(100), OnRequest())`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, TypeGuard

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
    "Tier",
    "SavePolicy",
    "KeepPolicy",
]


def is_whole(number: object) -> TypeGuard[int]:
    """Return whether a number is an integer of any type, numpy's included; a bool is none."""
    return isinstance(number, Integral) and not isinstance(number, bool)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A policy with a number of steps."""

    n: int
    """Number of steps to keep, or from one saved or kept step to the next."""

    def __post_init__(self) -> None:
        if not is_whole(self.n) or self.n < 1:
            raise InvalidError(f"{type(self).__name__}(n={self.n!r}): expected a positive whole number")
        object.__setattr__(self, "n", int(self.n))


@dataclass(frozen=True, slots=True)
class EveryNSteps(_Counted):
    """Save each step that `n` divides."""


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
            if not is_whole(step) or step < 0:
                raise InvalidError(f"AtSteps({step!r}): expected steps as whole numbers, as in AtSteps(100, 1000)")
        if not steps:
            raise InvalidError("AtSteps(): expected at least one step, as in AtSteps(100, 1000)")
        object.__setattr__(self, "steps", frozenset(map(int, steps)))


@dataclass(frozen=True, slots=True)
class OnRequest:
    """Save soon after any rank has called `request_save`."""


@dataclass(frozen=True, slots=True)
class LatestN(_Counted):
    """Keep the `n` steps that a resume would try first."""


@dataclass(frozen=True, slots=True)
class EveryNth(_Counted):
    """Keep each step that `n` divides; of those that training went back past, the ones of the last three timelines."""

    closest: bool = False
    """Keep the step nearest to each multiple of `n` instead, and the earlier of two equally near: for steps that are
    saved by seconds. As 0 is a multiple, the first step stays."""


@dataclass(frozen=True, slots=True)
class BestN(_Counted):
    """Keep the `n` steps with the best value of a metric. Steps without a finite value are not ranked."""

    metric: str
    """Name of the metric, as given to `save` or `maybe_save`."""

    mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is best. Of equal values the newer step is better."""

    def __post_init__(self) -> None:
        # Not super(): `slots=True` replaces the class, and Python 3.11 then looks for its bases in the wrong one.
        _Counted.__post_init__(self)
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise InvalidError(f"BestN(metric={metric!r}): expected the name of a metric, such as 'loss'")
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
class _Combination:
    """Several policies of one kind: all choose when to save, or all choose what to keep."""

    policies: tuple[SavePolicy | KeepPolicy, ...]
    """The policies."""

    def __init__(self, *policies: SavePolicy | KeepPolicy) -> None:
        name = type(self).__name__
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
        object.__setattr__(self, "policies", policies)


@dataclass(frozen=True, slots=True, init=False)
class AnyOf(_Combination):
    """Save or keep if at least one of several policies does."""


@dataclass(frozen=True, slots=True, init=False)
class AllOf(_Combination):
    """Save or keep if every one of several policies does."""

    def __init__(self, *policies: SavePolicy | KeepPolicy) -> None:
        _Combination.__init__(self, *policies)
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


PEERS_SCHEME = "peers://"
"""Begins the path of a near tier of which each node has a folder of its own."""


@dataclass(frozen=True, slots=True)
class Tier:
    """The near tier of a run: a fast folder before the root, seen by every rank.

    Steps that are due at the root are saved near, and drained to the root behind training.

    Example:
        near = holdfast.Tier("/local/nvme/run-7", every=10, keep_last=2)
        manager = holdfast.CheckpointManager("s3://bucket/run-7", every=100, near=near)
    """

    path: object
    """The folder, as str or Path; or `peers:///folder`, where each node has a folder of its own, and the nodes protect
    each other: see docs/memory.md."""

    every: int | SavePolicy
    """When `maybe_save` saves near: every so many steps, or by a policy. Steps that are due at the root are saved near
    too."""

    keep_last: int | None = None
    """Newest steps that stay near, beside those that wait for the drain; None for 2, and 1 in memory (tmpfs)."""

    bytes_max: int | None = None
    """Most bytes of all files there; None for what the file system holds. Without room, a step that is due at the root
    is saved straight there, and a step for the near tier alone fails in its handle."""

    agent: bool = False
    """Whether a process of its own brings the newest step to the root if the job is killed and does not come back."""

    orphan_seconds: float = 300.0
    """Seconds without a job after which the agent drains: longer than a restart takes."""

    linger_seconds: float = 1800.0
    """Seconds after this drain for which the near tier stays, for a job that comes late."""

    group: int | None = None
    """Of peers: smallest number of nodes that protect each other; each group stands the loss of any one of its nodes.
    None for 2 in a job of fewer than 8 nodes, else 4."""

    protect_timeout_seconds: float = 30.0
    """Of peers: seconds until `replicated`, after which that moment fails."""

    max_bytes_per_second: float | None = None
    """Of peers: most bytes that each node pulls in a second to protect others; None for no limit."""

    @property
    def has_peers(self) -> bool:
        """Whether each node has a folder of its own."""
        return str(self.path).startswith(PEERS_SCHEME)

    def __post_init__(self) -> None:
        text = self.path.__fspath__() if hasattr(self.path, "__fspath__") else self.path
        is_url = isinstance(text, str) and "://" in text.removeprefix(PEERS_SCHEME)
        if not isinstance(text, str) or not text or is_url:
            raise InvalidError(
                f"Tier({str(self.path)[:80]!r}): expected a folder that every rank sees, as str or Path, or "
                "'peers:///folder' for a folder on each node. A URL is the root: CheckpointManager(URL, "
                "near=Tier(folder))"
            )
        object.__setattr__(self, "path", text)
        if is_whole(self.every) and self.every < 1:
            raise InvalidError(f"Tier(every={self.every}): expected a positive whole number of steps, or a policy")
        if is_whole(self.every):
            object.__setattr__(self, "every", EveryNSteps(self.every))
        for rule in rules_of(self.every):
            if not isinstance(rule, SAVE_RULES):
                raise InvalidError(f"Tier(every={str(self.every)[:80]!r}): expected every=10, or a policy when to save")
        if self.keep_last is not None and (not is_whole(self.keep_last) or self.keep_last < 1):
            raise InvalidError(
                f"Tier(keep_last={self.keep_last!r}): expected a positive whole number of steps, or None"
            )
        for name in ("orphan_seconds", "linger_seconds", "protect_timeout_seconds"):
            seconds = getattr(self, name)
            if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
                raise InvalidError(f"Tier({name}={seconds!r}): expected seconds, 0 or more")
        self._check_peers()
        if self.bytes_max is not None and (not is_whole(self.bytes_max) or self.bytes_max < 1):
            raise InvalidError(f"Tier(bytes_max={self.bytes_max!r}): expected a positive number of bytes, or None")

    def _check_peers(self) -> None:
        if self.group is not None and (not is_whole(self.group) or self.group < 2):
            raise InvalidError(f"Tier(group={self.group!r}): expected 2 nodes or more, or None")
        cap = self.max_bytes_per_second
        if cap is not None and not 0 < cap < math.inf:
            raise InvalidError(f"Tier(max_bytes_per_second={cap!r}): expected a positive number of bytes, or None")
        if not self.has_peers and (self.group, cap) != (None, None):
            raise InvalidError(
                f"Tier({str(self.path)[:80]!r}, group=…, max_bytes_per_second=…): are of peers alone; expected "
                "Tier('peers:///folder', …)"
            )


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


def best_first(rule: BestN, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
    """Return the steps that have a finite value of the metric of a rule, the best one first.

    Args:
        rule: Names the metric, and which value is best. Of equal values the newer step comes first.
        metrics: The metrics of each step.
    """
    sign = 1 if rule.mode == "min" else -1
    values = ((step, found[rule.metric]) for step, found in metrics.items() if rule.metric in found)
    ranked = sorted((sign * value, -step) for step, value in values if math.isfinite(value))
    return [-step for _, step in ranked]
