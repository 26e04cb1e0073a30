"""Which steps of a run are kept, and why: a pure function of their manifests and tags."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from holdfast.base.types.removal import StepAndDigest
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
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

NEWEST = "newest"
"""Reason of the newest step, which every policy keeps."""

NEWEST_OF_FORMER = "newest of a superseded timeline"
"""Reason of the newest step of one of the last timelines before the newest one."""

LAST_HEALTHY = "last healthy"
"""Reason of the newest step that is not marked unhealthy, once the health of a step is known."""

FORMER_KEPT = 3
"""Timelines before the newest one of which the newest step stays. The last of them is where training was before it went
back. Two more serve a training that went back again before anybody looked. A training that goes back by itself must
not fill its disk."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:", re.ASCII)
_PERIOD_CHARACTERS = {"day": len("2026-01-31"), "hour": len("2026-01-31T23")}

Reasons = dict[StepAndDigest, tuple[str, ...]]
"""The reasons of each step that is kept, by step and digest of its manifest."""


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

    digest: str = ""
    """Digest of its manifest: several manifests may have one step, on different timelines."""

    @property
    def name(self) -> StepAndDigest:
        """Its step and digest."""
        return self.step, self.digest

    @property
    def age(self) -> tuple[int, int]:
        """The order in which a resume takes steps: by timeline, then by step."""
        return self.timeline.number, self.step


def kept(policy: KeepPolicy | None, steps: Sequence[KeptFacts], newest: Timeline | None = None) -> Reasons:
    """Return the steps that are kept, ascending, each with the reasons.

    The newest and the last healthy step of the chain are always kept, the latter once the health of a step is known.
    The chain is the newest timeline and its ancestors up to the fork. If no step of the newest timeline can be loaded,
    a restart falls back to the newest step of its chain.

    The newest step of each of the last few timelines before the newest one is kept. So is every step with a tag that is
    not in the chain. The decision is stable: after the other steps are removed, the same steps are kept.

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
    chain, former = _divided(steps, newest or max(steps, key=lambda facts: facts.age).timeline)
    reasons: Reasons = (
        {facts.name: ("no policy",) for facts in steps} if policy is None else _kept_by(policy, steps, chain, former)
    )
    always = [(max(chain, key=lambda facts: facts.age), NEWEST)] if chain else []
    always += [(max(timeline, key=lambda facts: facts.step), NEWEST_OF_FORMER) for timeline in former]
    left = {facts.name for facts in steps} - {facts.name for facts in chain}
    always += [(facts, f"tag {tag}") for facts in steps if facts.name in left for tag in sorted(facts.tags)]
    healthy = _last_healthy(chain)
    always += [] if healthy is None else [(healthy, LAST_HEALTHY)]
    for facts, why in always:
        reasons[facts.name] = (*reasons.get(facts.name, ()), why)
    return {name: tuple(dict.fromkeys(reasons[name])) for name in sorted(reasons)}


def _last_healthy(steps: Sequence[KeptFacts]) -> KeptFacts | None:
    """Return the newest healthy step; if no step is, the newest unchecked one.

    None if no step was checked, or if every step is unhealthy.
    """
    known = [facts for facts in steps if facts.healthy is not None]
    unmarked = [facts for facts in known if facts.healthy] or [facts for facts in steps if facts.healthy is None]
    return max(unmarked, key=lambda facts: facts.age) if known and unmarked else None


def _divided(steps: Iterable[KeptFacts], newest: Timeline) -> tuple[list[KeptFacts], list[list[KeptFacts]]]:
    """Return the steps that a resume may take, and those of each of the last few timelines before the newest one.

    Args:
        steps: Steps of the run.
        newest: The newest timeline.
    """
    chain: list[KeptFacts] = []
    former: dict[tuple[int, str], list[KeptFacts]] = {}
    for facts in steps:
        if newest.holds(facts.timeline.id, facts.step):
            chain.append(facts)
        if facts.timeline.id != newest.id:
            former.setdefault((facts.timeline.number, facts.timeline.id), []).append(facts)
    return chain, [former[timeline] for timeline in sorted(former)[-FORMER_KEPT:]]


def _kept_by(
    policy: KeepPolicy | SavePolicy,
    steps: Sequence[KeptFacts],
    chain: Sequence[KeptFacts],
    former: Sequence[Sequence[KeptFacts]],
) -> Reasons:
    if isinstance(policy, AnyOf | AllOf):
        kept_by_policy = [_kept_by(member, steps, chain, former) for member in policy.policies]
        together = set.union if isinstance(policy, AnyOf) else set.intersection
        chosen = together(*map(set, kept_by_policy))
        return {step: tuple(why for reasons in kept_by_policy for why in reasons.get(step, ())) for step in chosen}
    if isinstance(policy, LatestN):
        # Of the chain alone: steps that training left must not use up the places of those that a resume takes. If the
        # newest timeline is short, a resume that finds damage falls back to the steps before the fork.
        latest = sorted(chain, key=lambda facts: facts.age)[-policy.n :]
        return dict.fromkeys((facts.name for facts in latest), (f"latest {policy.n}",))
    if isinstance(policy, EveryNth):
        # Not of all timelines: each that went past a number would keep one step more.
        return {name: why for timeline in (chain, *former) for name, why in _every_nth(policy, timeline).items()}
    if isinstance(policy, BestN):
        return _best(policy, steps)
    if isinstance(policy, NewestPer):
        return _newest_per(policy, steps)
    assert isinstance(policy, Tagged), policy
    return {facts.name: tuple(f"tag {tag}" for tag in sorted(facts.tags)) for facts in steps if facts.tags}


def _every_nth(policy: EveryNth, steps: Sequence[KeptFacts]) -> Reasons:
    if not policy.closest:
        return {facts.name: (f"every {policy.n}",) for facts in steps if facts.step % policy.n == 0}
    ordered = sorted(steps, key=lambda facts: facts.name)
    # The last multiple, counted from 0, to which a step is at least as near as the step after it.
    last = [(facts.step + after.step) // (2 * policy.n) for facts, after in pairwise(ordered)]
    nearest = [
        facts for facts, (before, own) in zip(ordered, pairwise([-1, *last, math.inf]), strict=False) if before < own
    ]
    return dict.fromkeys((facts.name for facts in nearest), (f"closest to every {policy.n}",))


def _best(policy: BestN, steps: Sequence[KeptFacts]) -> Reasons:
    known = [facts for facts in sorted(steps, key=lambda facts: facts.name) if policy.metric in facts.metrics]
    if not known:
        names = sorted({name for facts in steps for name in facts.metrics})
        raise InvalidError(
            f"keep={policy}: no step has the metric {policy.metric!r}; they have {names or 'none'}. "
            "Nothing was decided: give the metric to save, or name another"
        )
    # By the place in the order: several may have one step.
    ranked = best_first(policy, dict(enumerate(facts.metrics for facts in known)))
    return dict.fromkeys((known[place].name for place in ranked[: policy.n]), (f"{policy.mode} {policy.metric}",))


def _newest_per(policy: NewestPer, steps: Sequence[KeptFacts]) -> Reasons:
    newest: dict[str, KeptFacts] = {}
    for facts in sorted(steps, key=lambda facts: facts.age):
        # A step whose time has another format forms a period of its own, so that it is kept.
        period = facts.created[: _PERIOD_CHARACTERS[policy.period]] if _TIME.match(facts.created) else f"? {facts.step}"
        newest[period] = facts
    return {facts.name: (f"newest of {period}",) for period, facts in newest.items()}


def waiting(
    policy: KeepPolicy | None, due: Iterable[KeptFacts], at_root: Iterable[KeptFacts], newest: Timeline | None = None
) -> list[KeptFacts]:
    """Return the due steps that wait for the drain, in the order of the drain. The other due steps are skipped.

    A step waits if the policy of the root would keep the step with all due steps in the root. A tagged step waits in
    any case.

    Args:
        policy: What the root keeps; None for everything.
        due: The steps that are due at the root, and only in the near tier.
        at_root: The complete steps of the root.
        newest: As for `kept`.
    Raises:
        InvalidError: As `kept`.
    """
    candidates = list(due)
    stays = kept(policy, [*at_root, *candidates], newest)
    return sorted((facts for facts in candidates if facts.name in stays or facts.tags), key=lambda facts: facts.age)
