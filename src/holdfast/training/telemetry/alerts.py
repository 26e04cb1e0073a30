"""Alerts: what a person should look at in a run. Pure: steps, saves and events in, alerts out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from typing import Literal

from holdfast.base.types.epoch import Holder
from holdfast.errors import InvalidError, counted, first_three, shown_bytes
from holdfast.training.telemetry.event_lines import EventLine
from holdfast.training.telemetry.log_lines import shown_seconds
from holdfast.training.telemetry.work import Work

Rule = Literal[
    "stalled", "slow_rank", "slow_save", "training_waits", "failing", "damaged", "unhealthy", "throttled", "no_room"
]
_USUAL = 20
"""Newest intervals between commits, and saves before the window, that say how long is usual."""

WINDOW_MAX = 20
"""Most saves of a window: all ranks of these saves are kept."""

SAVES_READ = WINDOW_MAX + _USUAL
"""Newest saves whose reports alerts need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRules:
    """The thresholds. An alert appears when a number is over its threshold."""

    stalled_intervals: float = 3.0
    """`stalled`: usual intervals between commits without a commit, while a writer holds the lease."""

    slow_rank_ratio: float = 2.0
    """`slow_rank`: own work of a rank by that of the median rank."""

    slow_rank_seconds: float = 1.0
    """`slow_rank`: own work of the rank, in seconds."""

    slow_rank_saves: int = 3
    """`slow_rank`: saves among the newest `window` in which both were over."""

    slow_save_ratio: float = 1.8
    """`slow_save`: seconds of each of the newest `window` saves by the median of the saves before them."""

    waits_fraction: float = 0.05
    """`training_waits`: time for which a save blocks training, by the interval between commits; medians."""

    waits_seconds: float = 0.1
    """`training_waits`: the same time in seconds. Shorter waits are noise."""

    throttled_requests: int = 10
    """`throttled`: requests that the store refused or left unanswered under load, in the newest `window` saves."""

    room_saves: float = 2.0
    """`no_room`: free bytes by those of the largest of the newest `window` saves; under the threshold."""

    window: int = 5
    """Newest saves that are looked at."""

    def __post_init__(self) -> None:
        """Check each threshold."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidError(f"AlertRules({each.name}={value!r}): expected a finite number, 0 or more")
        if self.window not in range(1, WINDOW_MAX + 1):
            raise InvalidError(f"AlertRules(window={self.window}): expected a number of saves from 1 to {WINDOW_MAX}")


@dataclass(frozen=True, slots=True)
class StepFact:
    """The facts about one step that alerts need."""

    step: int
    """The step."""

    status: str
    """Its state, in the words of `holdfast ls`."""

    created_unix_seconds: float | None = None
    """When it was saved; None if unknown."""

    bytes: int = 0
    """Bytes of its tensors."""

    damage: str = ""
    """Why it cannot be read, or why it is under quarantine."""

    findings: tuple[str, ...] = ()
    """Findings of its save against it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A run at one moment."""

    now_unix_seconds: float
    """The moment."""

    steps: Sequence[StepFact]
    """Every step that no newer timeline left behind, ascending."""

    saves: Sequence[Work]
    """The newest saves with reports, the newest first."""

    writer: Holder | None = None
    """The process that holds the writer lease, as far as is known; None without one."""

    under_way: frozenset[int] = frozenset()
    """Unfinished steps that are being saved."""

    failed: Sequence[EventLine] = ()
    """Tries that failed, as events say."""

    free_bytes: int | None = None
    """Free room of the root; None if unknown."""

    damage: tuple[str, ...] = ()
    """Damage of the run that is of no step."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding, and what to do."""

    rule: Rule
    """The rule."""

    text: str
    """The finding, for people."""

    act: str
    """What to do next."""

    step: int | None = None
    """The step, if it is of one."""

    rank: int | None = None
    """The rank, if it is of one."""

    host: str = ""
    """The machine of the rank or writer; empty if it is of none."""

    numbers: Mapping[str, float] | None = None
    """The measured numbers, by name."""


def alerts_of(situation: Situation, rules: AlertRules) -> list[Alert]:
    """Return the alerts of a run, in the order of the rules."""
    found = (check(situation, rules) for check in _CHECKS)
    return [alert for of_rule in found for alert in of_rule]


def _stalled(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    commits = _commits(now)
    interval = _interval(commits)
    if now.writer is None or not commits or interval is None:
        return
    silent = now.now_unix_seconds - commits[-1]
    if silent > rules.stalled_intervals * interval:
        yield Alert(
            "stalled",
            f"no commit for {shown_seconds(silent)}; usual are {shown_seconds(interval)}. {now.writer} holds the lease",
            "look whether this process trains: its log, its stack (py-spy dump), its store",
            _newest(now),
            host=now.writer.host,
            numbers={"silent_seconds": silent, "interval_seconds": interval},
        )


def _slow_rank(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    slow: dict[int, list[tuple[Work, float]]] = {}
    for save in now.saves[: rules.window]:
        usual = save.median_own_seconds
        for each in save.ranks:
            if each.own_seconds > max(rules.slow_rank_ratio * usual, rules.slow_rank_seconds):
                slow.setdefault(each.rank, []).append((save, each.own_seconds))
    for rank, saves in sorted(slow.items()):
        if len(saves) < rules.slow_rank_saves:
            continue
        save, seconds = saves[0]
        of_rank = next(one for one in save.ranks if one.rank == rank)
        longest = max(of_rank.phases, key=lambda name: of_rank.phases[name] if name not in ("wait", "queue") else -1.0)
        yield Alert(
            "slow_rank",
            f"rank {rank} worked {shown_seconds(seconds)}, the median rank {shown_seconds(save.median_own_seconds)}, "
            f"in {len(saves)} of {len(now.saves[: rules.window])} saves; longest in {longest}",
            f"look at host {of_rank.host}: its disk, network and memory, and its phases in the heat map of the save",
            save.step, rank, of_rank.host,
            {"seconds": seconds, "median_seconds": save.median_own_seconds, "saves": len(saves)},
        )  # fmt: skip


def _slow_save(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    newest, before = now.saves[: rules.window], now.saves[rules.window : rules.window + _USUAL]
    if len(newest) < rules.window or len(before) < rules.window:
        return
    usual = median(save.seconds for save in before)
    fastest = min(save.seconds for save in newest)
    if fastest > rules.slow_save_ratio * usual:
        yield Alert(
            "slow_save",
            f"the last {rules.window} saves took {shown_seconds(fastest)} or more; usual were {shown_seconds(usual)}",
            "compare the phases of this save with those of an older one, and look at the store",
            newest[0].step,
            numbers={"seconds": fastest, "usual_seconds": usual},
        )


def _training_waits(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    interval, saves = _interval(_commits(now)), now.saves[: rules.window]
    if interval is None or not saves:
        return
    held = median(save.held_seconds for save in saves)
    if held > max(rules.waits_fraction * interval, rules.waits_seconds):
        yield Alert(
            "training_waits",
            f"a save blocks training for {shown_seconds(held)} of {shown_seconds(interval)}: {held / interval:.0%}",
            'save more seldom, or with Settings(staging="lazy") and more arena_bytes_max',
            saves[0].step,
            numbers={"held_seconds": held, "interval_seconds": interval},
        )


def _failing(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    commits = _commits(now)
    last = commits[-1] if commits else float("-inf")
    newest = _newest(now)
    failed = [each for each in now.failed if each.verb == "save" and each.time.timestamp() > last]
    unfinished = [fact.step for fact in now.steps if fact.status == "unfinished" and fact.step not in now.under_way]
    unfinished = [step for step in unfinished if newest is None or step > newest]
    steps = sorted({*unfinished, *(each.step for each in failed if each.step is not None)})
    if not failed and not unfinished:
        return
    reason = (
        f"{failed[-1].error}: {failed[-1].message}"
        if failed
        else "no manifest: the job was killed, or events are not known (--events)"
    )
    since = "since the first save" if newest is None else f"since step {newest}"
    yield Alert(
        "failing",
        f"{counted(len(steps) or len(failed), 'save')} failed or unfinished {since}: {first_three(steps)}. {reason}",
        "read the error in the log of the rank; a resume goes on from the last commit",
        steps[-1] if steps else None,
        failed[-1].rank if failed else None,
        failed[-1].host if failed else "",
        {"saves": len(steps) or len(failed)},
    )


def _damaged(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    act = "holdfast verify shows the places; holdfast repair rebuilds a manifest or an index"
    yield from (Alert("damaged", text, act) for text in now.damage)
    yield from (
        Alert("damaged", f"step {fact.step}: {fact.damage}", act, fact.step) for fact in now.steps if fact.damage
    )


def _unhealthy(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    committed = [fact for fact in now.steps if fact.status == "committed" and not fact.damage]
    if committed and committed[-1].findings:
        findings = committed[-1].findings
        yield Alert(
            "unhealthy",
            f"the newest step: {first_three(findings)}",
            "go back to the last healthy step before training makes it worse",
            committed[-1].step,
            numbers={"findings": len(findings)},
        )


def _throttled(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    saves = now.saves[: rules.window]
    requests = sum(save.throttled for save in saves)
    if requests > rules.throttled_requests:
        yield Alert(
            "throttled",
            f"the store refused {requests:,} requests under load in the last {counted(len(saves), 'save')}",
            "raise the quota of the bucket, or lower the requests in flight (docs/stores.md)",
            saves[0].step,
            numbers={"requests": requests},
        )


def _no_room(now: Situation, rules: AlertRules) -> Iterator[Alert]:
    committed = [fact for fact in now.steps if fact.status == "committed"]
    need = max((fact.bytes for fact in committed[-rules.window :]), default=0)
    if now.free_bytes is not None and now.free_bytes < rules.room_saves * need:
        yield Alert(
            "no_room",
            f"{shown_bytes(now.free_bytes)} free; a save has {shown_bytes(need)}",
            "free some room, keep fewer steps (keep_last), or save elsewhere",
            numbers={"free_bytes": now.free_bytes, "save_bytes": need},
        )


_CHECKS = (
    _stalled, _slow_rank, _slow_save, _training_waits, _failing, _damaged, _unhealthy, _throttled, _no_room
)  # fmt: skip


def _newest(now: Situation) -> int | None:
    return max((fact.step for fact in now.steps if fact.status == "committed"), default=None)


def _commits(now: Situation) -> list[float]:
    """Return when the steps were committed, ascending."""
    times = (fact.created_unix_seconds for fact in now.steps if fact.status == "committed")
    return sorted(time for time in times if time is not None)


def _interval(commits: Sequence[float]) -> float | None:
    """Return the usual seconds between two commits; None if fewer than three are known."""
    intervals = [later - earlier for earlier, later in pairwise(commits[-_USUAL - 1 :])]
    return median(intervals) if len(intervals) > 1 else None
