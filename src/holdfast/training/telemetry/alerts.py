"""Alerts: the findings in a run that a person should look at. Pure: steps, saves and events in, alerts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import pairwise
from statistics import median, median_low

from holdfast.base.types.epoch import Holder
from holdfast.base.types.manifest import Parent
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.errors import InvalidError, counted, first_three, shown_bytes
from holdfast.training.telemetry.event_lines import EventLine
from holdfast.training.telemetry.log_lines import shown_seconds
from holdfast.training.telemetry.work import Work

USUAL = 20
"""Newest intervals between commits, and saves before the window, that say how long is usual."""

WINDOW_MAX = 20
"""Most saves of a window: all ranks of these saves are kept."""

_ACTS = {
    "stalled": "look whether this process trains: its log, its stack (py-spy dump), its store",
    "slow_rank": "look at this host: its disk, network and memory, and the heat map of the save",
    "slow_save": "compare the phases of this save with those of an older one, and look at the store",
    "training_waits": 'save more seldom, or with Settings(staging="lazy") and more arena_bytes_max',
    "failing": "read the log of the rank; a resume goes on from the last commit",
    "damaged": "holdfast verify shows the places; holdfast repair rebuilds a manifest or an index",
    "unhealthy": "go back to the last healthy step before training makes the state worse",
    "throttled": "raise the quota of the bucket, or lower the requests in flight (docs/stores.md)",
    "no_room": "free some room, keep fewer steps (keep_last), or save elsewhere",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRules:
    """The thresholds. An alert appears when a number is over its threshold."""

    stalled_intervals: float = 3.0
    """`stalled`: usual intervals between commits without a commit, while a writer holds the lease."""

    stalled_seconds: float = 5.0
    """`stalled`: the same time in seconds. Manifests state whole seconds."""

    slow_rank_ratio: float = 2.0
    """`slow_rank`: own work of a rank by that of the median rank."""

    slow_rank_seconds: float = 1.0
    """`slow_rank`: own work of the rank, in seconds."""

    slow_rank_saves: int = 3
    """`slow_rank`: saves among the newest `window` in which both are over; this number of saves is enough."""

    slow_save_ratio: float = 1.8
    """`slow_save`: seconds of each of the newest `window` saves by the median of the saves before them."""

    slow_save_seconds: float = 1.0
    """`slow_save`: seconds of each of these saves. Shorter saves are noise."""

    waits_fraction: float = 0.05
    """`training_waits`: time for which a save blocks training, by the interval between saves; medians."""

    waits_seconds: float = 0.1
    """`training_waits`: the same time in seconds. Shorter waits are noise."""

    throttled_requests: int = 10
    """`throttled`: requests that the store refused or left unanswered under load, in the newest `window` saves."""

    room_saves: float = 2.0
    """`no_room`: free bytes by those of the largest of the newest `window` steps; under the threshold."""

    window: int = 5
    """Newest saves that are looked at."""

    def __post_init__(self) -> None:
        """Check each threshold."""
        for each in fields(self):
            value, is_window = getattr(self, each.name), each.name == "window"
            least, most = (1, WINDOW_MAX) if is_window else (0, 1e18)
            if not isinstance(value, int if is_window else int | float) or not least <= value <= most:
                raise InvalidError(f"AlertRules({each.name}={value!r}): expected a number from {least} to {most:g}")


@dataclass(frozen=True, slots=True)
class StepFact:
    """The facts about one step of a run, for alerts and for people."""

    step: int
    """The step."""

    name: str
    """The name by which the step is loaded."""

    status: str
    """Its state, in the words of `holdfast ls`."""

    created_unix_seconds: float | None = None
    """When it was saved; None if unknown."""

    bytes: int | None = None
    """Bytes of its tensors; None if unknown."""

    damage: str = ""
    """Why it cannot be read, or why it is under quarantine."""

    findings: Sequence[str] = ()
    """Findings of its save against it."""

    tags: Sequence[str] = ()
    """Its tags."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Its metrics."""

    timeline: Timeline = FIRST_TIMELINE
    """Its timeline."""

    parent: Parent | None = None
    """The checkpoint that it continues, in this run or in another; None without one."""

    is_discarded: bool = False
    """Whether training went back and discarded the step."""

    work: Work | None = None
    """Its save; None if no report tells, or before the reports are read."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A run at one moment."""

    now_unix_seconds: float
    """The moment."""

    steps: Sequence[StepFact]
    """Every step, ascending."""

    writer: Holder | None = None
    """The process that holds the writer lease, as far as is known; None without one."""

    under_way: frozenset[int] = frozenset()
    """Unfinished steps that are being saved."""

    failed: Sequence[EventLine] = ()
    """Tries that failed, as events say."""

    free_bytes: int | None = None
    """Free room of the root; None if unknown."""

    damage: Sequence[str] = ()
    """Damage of the run that is of no step."""

    is_near_hidden: bool = False
    """Whether the root names a near tier that this host does not see: a drain looks like a killed save."""

    @property
    def saves(self) -> list[Work]:
        """The saves with reports, the newest first. Steps that a newer timeline left behind count too."""
        facts = sorted(self.steps, key=lambda fact: (fact.timeline.number, fact.step), reverse=True)
        return [fact.work for fact in facts if fact.work is not None][: WINDOW_MAX + USUAL]

    @property
    def committed(self) -> list[StepFact]:
        """The committed steps, ascending."""
        return [fact for fact in self.steps if fact.status == "committed"]

    @property
    def commits(self) -> list[float]:
        """The times of all commits, ascending; those of steps that a newer timeline left behind too."""
        facts = (fact for fact in self.steps if fact.status in ("committed", "superseded"))
        return sorted(fact.created_unix_seconds for fact in facts if fact.created_unix_seconds is not None)


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding, and the next act."""

    rule: str
    """The rule."""

    text: str
    """The finding, for people."""

    step: int | None = None
    """The step, if it is of one."""

    rank: int | None = None
    """The rank, if it is of one."""

    host: str = ""
    """The machine of the rank or writer; empty if it is of none."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """The measured numbers, by name."""

    act: str = ""
    """The next act."""

    def __post_init__(self) -> None:
        """Take the act of the rule."""
        object.__setattr__(self, "act", _ACTS[self.rule])


def alerts_of(situation: Situation, rules: AlertRules) -> list[Alert]:
    """Return the alerts of a run, in the order of the rules."""
    checks = (_stalled, _saves, _failing, _damaged, _unhealthy, _no_room)
    return [alert for check in checks for alert in check(situation, rules)]


def _stalled(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    commits = now.commits
    if now.writer is None or len(commits) < 2:
        return
    began = 0.0
    with suppress(ValueError, OverflowError):
        began = datetime.fromisoformat(now.writer.since).timestamp()
    silent = now.now_unix_seconds - max(commits[-1], began)
    interval = _interval(commits[-USUAL - 1 :])
    if silent > max(rules.stalled_intervals * interval, rules.stalled_seconds):
        usual = f"usual are {shown_seconds(interval)}. {now.writer} holds the lease"
        numbers = {"silent_seconds": silent, "interval_seconds": interval}
        text = f"no commit for {shown_seconds(silent)}; {usual}"
        step = max((fact.step for fact in now.committed), default=None)
        yield Alert("stalled", text, step, host=now.writer.host, numbers=numbers)


def _saves(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    saves, before = now.saves[: rules.window], now.saves[rules.window :]
    if not saves:
        return
    yield from _slow_ranks(saves, rules)
    usual = median(save.seconds for save in before) if len(before) >= rules.window else float("inf")
    fastest, step = min(save.seconds for save in saves), saves[0].step
    if fastest > max(rules.slow_save_ratio * usual, rules.slow_save_seconds):
        text = f"the last {len(saves)} saves took {shown_seconds(fastest)} or more; usual were {shown_seconds(usual)}"
        yield Alert("slow_save", text, step, numbers={"seconds": fastest, "usual_seconds": usual})
    # The first save allocates its memory: of two saves the shorter wait counts.
    held = median_low(save.held_seconds for save in saves)
    interval = _interval([save.began_unix_seconds for save in reversed(now.saves[: USUAL + 1])])
    if interval and held > max(rules.waits_fraction * interval, rules.waits_seconds):
        text = f"a save blocks training for {shown_seconds(held)} of {shown_seconds(interval)}: {held / interval:.0%}"
        yield Alert("training_waits", text, step, numbers={"held_seconds": held, "interval_seconds": interval})
    requests = sum(save.throttled for save in saves)
    if requests > rules.throttled_requests:
        text = f"the store refused {requests:,} requests under load in the last {counted(len(saves), 'save')}"
        yield Alert("throttled", text, step, numbers={"requests": requests})


def _slow_ranks(saves: Sequence[Work], rules: AlertRules) -> Iterator[Alert]:
    slow: dict[int, list[Work]] = {}
    for save in saves:
        limit = max(rules.slow_rank_ratio * save.extremes["median"].own_seconds, rules.slow_rank_seconds)
        for rank in save.ranks:
            if rank.own_seconds > limit:
                slow.setdefault(rank.rank, []).append(save)
    for number, found in sorted(slow.items()):
        if len(found) >= max(rules.slow_rank_saves, 1):
            save = found[0]
            rank = next(each for each in save.ranks if each.rank == number)
            seconds, usual = rank.own_seconds, save.extremes["median"].own_seconds
            text = f"worked {shown_seconds(seconds)}, the median rank {shown_seconds(usual)}"
            text += f", in {len(found)} of {len(saves)} saves; longest in {rank.longest_phase}"
            numbers = {"seconds": seconds, "median_seconds": usual, "saves": len(found)}
            yield Alert("slow_rank", text, save.step, number, rank.host, numbers)


def _failing(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    newest, last = now.committed[-1:], max(now.commits, default=0.0)
    failed = [each for each in now.failed if each.verb == "save" and each.time.timestamp() > last + 1]
    open_steps = [fact.step for fact in now.steps if fact.status == "unfinished" and fact.step not in now.under_way]
    # After going back, an attempt may be of the timeline that training left: up to the next save of that timeline.
    left = max((float(fact.step) for fact in now.steps if fact.status == "superseded"), default=-1.0)
    if left >= 0:
        left += _interval(sorted({fact.step for fact in now.steps if fact.bytes is not None}))
    above = max(newest[0].step, left) if newest else -1
    steps = {step for step in open_steps if step > above and not now.is_near_hidden}
    steps |= {each.step for each in failed if each.step is not None}
    count = len(steps) or len(failed)
    if count:
        since = f"since step {newest[0].step}" if newest else "since the start"
        why = "no event tells why: the job was killed, or pass --events"
        step, rank, host = max(steps, default=None), None, ""
        # A rank that another rank's error aborted says so: the cause tells more.
        if failed := [each for each in failed if " aborted: " not in each.message] or failed:
            rank, host, why = failed[-1].rank, failed[-1].host, f"{failed[-1].error}: {failed[-1].message}"
            why = f"at {failed[-1].time:%H:%M:%S} {why}"
        tried = f"step{'s' * (len(steps) > 1)} {first_three(sorted(steps))}, " if steps else ""
        text = f"{tried}{counted(count, 'save')} without a commit {since}: {why}"
        yield Alert("failing", text, step, rank, host, {"saves": count})


def _damaged(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    yield from (Alert("damaged", text) for text in now.damage)
    yield from (Alert("damaged", fact.damage, fact.step) for fact in now.steps if fact.damage)


def _unhealthy(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    for fact in now.committed[-1:]:
        if fact.findings:
            text = f"the newest step: {first_three(fact.findings)}"
            yield Alert("unhealthy", text, fact.step, numbers={"findings": len(fact.findings)})


def _no_room(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    need = max((fact.bytes or 0 for fact in now.committed[-rules.window :]), default=0)
    if now.free_bytes is not None and now.free_bytes < rules.room_saves * need:
        numbers = {"free_bytes": now.free_bytes, "save_bytes": need}
        yield Alert("no_room", f"{shown_bytes(now.free_bytes)} free; a save has {shown_bytes(need)}", numbers=numbers)


def _interval(times: Sequence[float]) -> float:
    """Return the usual seconds between two of some times; 0 if there are too few.

    Retention makes intervals longer, never shorter, and mostly keeps the newest steps: the longer of the newest two
    intervals counts if the median is longer.
    """
    found = [later - earlier for earlier, later in pairwise(times)] or [0.0]
    return min(median(found), max(found[-2:]))
