"""Which steps of a run are kept, and why: a pure function of their manifests and tags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import InvalidError
from holdfast.policies import (
    AllOf,
    AnyOf,
    BestN,
    EveryNth,
    KeepPolicy,
    LatestN,
    NewestPer,
    SavePolicy,
    Tagged,
    best_first,
)
from holdfast.types.timeline import FIRST_TIMELINE, Timeline

NEWEST = "newest"
"""Reason of the newest step, which every policy keeps."""

LAST_HEALTHY = "last healthy"
"""Reason of the newest step that is not marked unhealthy, once the health of a step is known."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:", re.ASCII)
_PERIOD_CHARACTERS = {"day": len("2026-01-31"), "hour": len("2026-01-31T23")}

Reasons = dict[int, tuple[str, ...]]
"""The reasons of each step that is kept."""


@dataclass(frozen=True, slots=True)
class KeptFacts:
    """The facts about a valid step that retention uses."""

    step: int
    """The step."""

    created: str = ""
    """Creation time in its manifest; groups steps, never orders them."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics passed to the save."""

    tags: tuple[str, ...] = ()
    """Its tags."""

    healthy: bool | None = None
    """Whether its save found neither non-finite values nor diverged replicas; None: not checked."""

    timeline: Timeline = FIRST_TIMELINE
    """Its timeline."""

    @property
    def age(self) -> tuple[int, int]:
        """The order in which a resume takes steps: by timeline, then by step."""
        return self.timeline.number, self.step


def kept(policy: KeepPolicy | None, steps: Sequence[KeptFacts], newest: Timeline | None = None) -> Reasons:
    """Return the steps that are kept, ascending, each with the reasons.

    The newest step of each timeline is always kept. So are the newest and the last healthy step of the chain, which is
    the newest timeline and its ancestors up to the fork; the latter once the health of a step is known. If no step of
    the newest timeline can be loaded, a restart falls back to the newest step of its chain. The decision is stable:
    after the other steps are removed, the same steps are kept.

    Args:
        policy: What to keep; None for everything.
        steps: The complete steps of the run, in any order. Leave out damaged steps: they must not take the place of a
            step that can be loaded.
        newest: The newest timeline, of which no step may be among them; None for that of the newest step.
    Raises:
        InvalidError: The policy ranks by a metric that no step has; the message names it. A misspelt name must not
            remove the best step.
    """
    if not steps:
        return {}
    chain = _chain(steps, newest or max(steps, key=lambda facts: facts.age).timeline)
    reasons: Reasons = (
        {facts.step: ("no policy",) for facts in steps} if policy is None else _kept_by(policy, steps, chain)
    )
    end = max(chain, key=lambda facts: facts.age).step if chain else None
    for step in {max(facts.step for facts in timeline) for timeline in _by_timeline(steps)} | {end}:
        if step is not None:
            why = NEWEST if step == end else f"{NEWEST} of a superseded timeline"
            reasons[step] = (*reasons.get(step, ()), why)
    healthy = _last_healthy(chain)
    if healthy is not None:
        reasons[healthy] = (*reasons.get(healthy, ()), LAST_HEALTHY)
    return {step: tuple(dict.fromkeys(reasons[step])) for step in sorted(reasons)}


def _last_healthy(steps: Sequence[KeptFacts]) -> int | None:
    """Return the newest healthy step; if no step is, the newest unchecked one.

    None if no step was checked, or if every step is unhealthy.
    """
    known = [facts for facts in steps if facts.healthy is not None]
    unmarked = [facts for facts in known if facts.healthy] or [facts for facts in steps if facts.healthy is None]
    return max(unmarked, key=lambda facts: facts.age).step if known and unmarked else None


def _chain(steps: Iterable[KeptFacts], newest: Timeline) -> list[KeptFacts]:
    """Return the steps that a resume may take: those of the newest timeline, and those of its ancestors up to the fork.

    Args:
        steps: Steps of the run.
        newest: The newest timeline.
    """
    return [facts for facts in steps if newest.holds(facts.timeline.id, facts.step)]


def _by_timeline(steps: Sequence[KeptFacts]) -> Iterable[list[KeptFacts]]:
    """Return the steps of each timeline."""
    timelines: dict[str, list[KeptFacts]] = {}
    for facts in steps:
        timelines.setdefault(facts.timeline.id, []).append(facts)
    return timelines.values()


def _kept_by(policy: KeepPolicy | SavePolicy, steps: Sequence[KeptFacts], chain: Sequence[KeptFacts]) -> Reasons:
    if isinstance(policy, AnyOf | AllOf):
        kept_by_policy = [_kept_by(member, steps, chain) for member in policy.policies]
        together = set.union if isinstance(policy, AnyOf) else set.intersection
        chosen = together(*map(set, kept_by_policy))
        return {step: tuple(why for reasons in kept_by_policy for why in reasons.get(step, ())) for step in chosen}
    if isinstance(policy, LatestN):
        # Each timeline by itself: going back must not use up the steps that it went back past, nor the reverse. And the
        # chain of the newest one: if that is short, a resume that finds damage falls back to the steps before the fork.
        groups = [*_by_timeline(steps), chain]
        latest = [sorted(group, key=lambda facts: facts.age)[-policy.n :] for group in groups]
        return dict.fromkeys((facts.step for group in latest for facts in group), (f"latest {policy.n}",))
    if isinstance(policy, EveryNth):
        return {facts.step: (f"every {policy.n}",) for facts in steps if facts.step % policy.n == 0}
    if isinstance(policy, BestN):
        return _best(policy, steps)
    if isinstance(policy, NewestPer):
        return _newest_per(policy, steps)
    assert isinstance(policy, Tagged), policy
    return {facts.step: tuple(f"tag {tag}" for tag in sorted(facts.tags)) for facts in steps if facts.tags}


def _best(policy: BestN, steps: Sequence[KeptFacts]) -> Reasons:
    known = [facts for facts in steps if policy.metric in facts.metrics]
    if not known:
        names = sorted({name for facts in steps for name in facts.metrics})
        raise InvalidError(
            f"keep={policy}: no step has the metric {policy.metric!r}; they have {names or 'none'}. "
            "Nothing was decided: give the metric to save, or name another"
        )
    ranked = best_first(policy, {facts.step: facts.metrics for facts in known})
    return dict.fromkeys(ranked[: policy.n], (f"{policy.mode} {policy.metric}",))


def _newest_per(policy: NewestPer, steps: Sequence[KeptFacts]) -> Reasons:
    newest: dict[str, KeptFacts] = {}
    for facts in sorted(steps, key=lambda facts: facts.age):
        # A step whose time has another format forms a period of its own, so that it is kept.
        period = facts.created[: _PERIOD_CHARACTERS[policy.period]] if _TIME.match(facts.created) else f"? {facts.step}"
        newest[period] = facts
    return {facts.step: (f"newest of {period}",) for period, facts in newest.items()}
