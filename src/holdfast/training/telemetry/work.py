"""One save, load or drain on all its ranks: how long each rank worked, waited and held training up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.base.types.events import Phase, RankReport, Verb
from holdfast.training.telemetry.log_lines import blocked_seconds

_OWN = {"collect", "plan", "compare", "replicas", "copy", "write", "part", "read", "restore", "send"}
"""Phases of a rank's own work. In all others a rank waits for other ranks, or works for all of them."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """The part of one rank."""

    rank: int
    """The rank."""

    host: str
    """Name of its machine."""

    seconds: float
    """Seconds from the call until the end on this rank."""

    own_seconds: float
    """Seconds of its own work, without waiting for other ranks."""

    held_seconds: float
    """Seconds for which a save blocked training; 0 for a load or drain."""

    bytes_per_second: float
    """Bytes per second of the phases that move bytes."""

    throttled: int
    """Requests that the store refused or left unanswered under load."""

    phases: Mapping[str, float]
    """Seconds by phase, in the order in which the phases began."""

    @property
    def longest_phase(self) -> str:
        """The phase of own work that took longest; empty without one."""
        return max(_OWN & self.phases.keys(), key=lambda name: self.phases[name], default="")


@dataclass(frozen=True, slots=True)
class Work:
    """One save, load or drain, as the stored reports of its ranks tell."""

    verb: Verb
    """Whether it saves, loads or drains."""

    id: str
    """The id that its reports share; of a save, the attempt."""

    step: int | None
    """The step; None for a checkpoint saved by path."""

    world_size: int
    """Ranks that worked together."""

    began_unix_seconds: float
    """Wall-clock time of the first call."""

    ranks: tuple[RankWork, ...]
    """Every rank with a report, ascending; of an older save that is watched, the extremes alone."""

    seconds: float
    """Seconds on the rank that took longest."""

    held_seconds: float
    """Seconds for which the save blocked training, on the rank that was blocked longest."""

    throttled: int
    """Requests of all ranks that the store refused or left unanswered under load."""

    @property
    def extremes(self) -> dict[str, RankWork]:
        """The slowest, the median and the fastest rank by own work. Of two ranks the faster one is the median."""
        ordered = sorted(self.ranks, key=lambda rank: (-rank.own_seconds, rank.rank))
        return {"slowest": ordered[0], "median": ordered[len(ordered) // 2], "fastest": ordered[-1]}


def works_of(reports: Iterable[RankReport]) -> list[Work]:
    """Return the saves, loads and drains that reports are of, the newest first.

    Example:
        reports = [report for _, report in holdfast.api.reports("run-7", 300)]
        print([(work.verb, work.extremes["slowest"].rank) for work in holdfast.api.works_of(reports)])
    Args:
        reports: The reports, of any ranks, in any order.
    """
    found: dict[tuple[str, str], dict[int, RankReport]] = {}
    for report in reports:
        found.setdefault((report.operation.verb, report.id), {})[report.operation.rank] = report
    works = []
    for (_, id_), of_rank in found.items():
        operation = next(iter(of_rank.values())).operation
        began = min(each.began_unix_seconds for each in of_rank.values())
        ranks = tuple(_rank_work(of_rank[rank]) for rank in sorted(of_rank))
        seconds, held = max(rank.seconds for rank in ranks), max(rank.held_seconds for rank in ranks)
        throttled, size = sum(rank.throttled for rank in ranks), operation.world_size
        works.append(Work(operation.verb, id_, operation.step, size, began, ranks, seconds, held, throttled))
    return sorted(works, key=lambda work: -work.began_unix_seconds)


def _rank_work(report: RankReport) -> RankWork:
    phases: dict[str, float] = {}
    for phase in report.phases:
        phases[phase.name] = phases.get(phase.name, 0.0) + phase.seconds
    facts: dict[str, Any] = dict(report.facts)
    held, throttled = 0.0, 0
    with suppress(TypeError, ValueError, OverflowError):  # Reports come from strangers, and facts are of any type.
        throttled = int(facts.get("throttled", 0))
        waits = float(facts.get("staged_seconds", 0)), float(facts.get("fence_seconds", 0))
        if report.operation.verb == "save":
            held = blocked_seconds(facts.get("staging", ""), *waits, report.phases)
    own, rank = _covered(phase for phase in report.phases if phase.name in _OWN), report.operation.rank
    speed = report.bytes_per_second
    return RankWork(rank, report.host, report.seconds, own, held, speed, throttled, phases)


def _covered(phases: Iterable[Phase]) -> float:
    """Return the seconds that at least one phase covers: copies are written while others are made."""
    covered, end = 0.0, 0.0
    for phase in sorted(phases, key=lambda phase: phase.start_seconds):
        covered += max(phase.stop_seconds - max(phase.start_seconds, end), 0.0)
        end = max(end, phase.stop_seconds)
    return covered
