"""Reports of saves and loads as a trace: what each rank did when, for Perfetto and chrome://tracing to draw.

Source: Trace Event Format, "Complete Events" (`X`), "Async Events" (`b`, `e`) and "Metadata Events" (`M`), as
ui.perfetto.dev and chrome://tracing read it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import CheckpointError, MissingError
from holdfast.format.names import MANIFEST_FILE, step_folder
from holdfast.ports.store import Store
from holdfast.repository.catalog import exists, step_folders
from holdfast.repository.reports import REPORTS_FOLDER, reports_in
from holdfast.types.events import Phase, RankReport

Fields = dict[str, object]

_SAVING = ("collect", "agree", "plan", "compare", "replicas", "copy", "fence", "write", "queue", "part", "vote", "wait")
_COMMITTING = ("index", "publish", "sweep")
_TRACKS = {
    "save": (*_SAVING, *_COMMITTING),
    "load": ("resolve", "plan", "agree", "exchange", "read", "restore", "wait"),
}
"""Phases in the order in which their tracks lie below one another."""


EVENTS_MAX = 500_000
"""Phases and reports in one trace, about: what is drawn in a browser, and what this takes in memory, has an end."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What the reports beside one checkpoint, or all of a run, come to."""

    document: Fields
    """The trace, as JSON holds it."""

    saves: int
    """Saves in it, each counted once for all its ranks."""

    loads: int
    """Loads, likewise."""

    ranks: int
    """Ranks that left a report."""

    unreadable: tuple[tuple[str, CheckpointError], ...]
    """Reports that could not be read, by key, and why."""

    left_out_from: str | None = None
    """The first folder of which reports are left out, because there are more than a trace holds: it and all older."""


def trace_of(store: Store) -> Trace:
    """Return the trace of a checkpoint, or of every step of a run.

    Raises:
        MissingError: There are no reports.
    """
    folders = [""] if exists(store, MANIFEST_FILE) else []
    folders = folders or [step_folder(step) for step in step_folders(store)] or [""]
    reports: list[RankReport] = []
    unreadable: list[tuple[str, CheckpointError]] = []
    events, left_out_from = 0, None
    for folder in reversed(folders):
        for key, found in reports_in(store, folder):
            if events > EVENTS_MAX:
                left_out_from = folder
                break
            events += 1
            if isinstance(found, RankReport):
                reports.append(found)
                events += len(found.phases)
            else:
                unreadable.append((key, found))
        if left_out_from is not None:
            break
    if not reports:
        damaged = f"; of {len(unreadable)} that are there none can be read: {unreadable[0][1]}" if unreadable else ""
        raise MissingError(
            f"{store.url}: no reports of a save or load; expected a checkpoint or the root of a run, with files under "
            f"{REPORTS_FOLDER}{damaged}. They are left unless settings.reports is False, by Holdfast since format 1.2"
        )
    operations = {(each.operation.verb, each.id) for each in reports}
    return Trace(
        document=trace_document(reports),
        saves=sum(verb == "save" for verb, _ in operations),
        loads=sum(verb == "load" for verb, _ in operations),
        ranks=len({each.operation.rank for each in reports}),
        unreadable=tuple(unreadable),
        left_out_from=left_out_from,
    )


def trace_document(reports: Sequence[RankReport]) -> Fields:
    """Return reports as a trace: one process per rank, one track per phase, and the operations above them.

    Ranks lie beside each other as the wall clocks of their machines say; within one operation of a rank all lengths
    are of one monotonic clock. Times are in microseconds since the first report began.
    """
    first = min(each.began_unix_seconds for each in reports)
    ordered = sorted(reports, key=lambda each: (each.operation.rank, each.began_unix_seconds))
    lanes = _Lanes()
    events = [event for each in ordered for event in _events(each, first, lanes)]
    events.sort(key=_time_of)
    ranks = {each.operation.rank: each.host for each in ordered}
    return {
        "displayTimeUnit": "ms",
        "otherData": {"began_unix_seconds": first},
        "traceEvents": [*_names(ranks, lanes), *events],
    }


def _events(report: RankReport, first: float, lanes: _Lanes) -> Iterator[Fields]:
    operation = report.operation
    rank, verb = operation.rank, operation.verb
    start = report.began_unix_seconds - first
    spans: Fields = {"cat": verb, "pid": rank, "tid": 0, "id2": {"local": f"{verb}-{report.id}"}}
    told = {"id": report.id, "host": report.host, "pid": report.pid, "bytes": report.bytes}
    # What is written in no time at all has no bandwidth that a number holds.
    told |= {"bytes_per_second": round(min(report.bytes_per_second, 1e18)), **report.facts}
    name = verb if operation.step is None else f"{verb} {operation.step}"
    yield {"ph": "b", "name": name, "ts": _microseconds(start), **spans, "args": told}
    for phase in report.phases:
        yield {
            "ph": "X",
            "name": phase.name,
            "cat": verb,
            "pid": rank,
            "tid": lanes.track(rank, verb, phase, start),
            "ts": _microseconds(start + phase.start_seconds),
            "dur": _microseconds(phase.seconds),
            "args": {"step": operation.step, "id": report.id},
        }
    yield {"ph": "e", "name": name, "ts": _microseconds(start + report.seconds), **spans}


def _names(ranks: dict[int, str], lanes: _Lanes) -> Iterator[Fields]:
    for rank, host in ranks.items():
        for field, value in (("name", f"rank {rank}"), ("labels", host), ("sort_index", rank)):
            yield {"ph": "M", "name": f"process_{field}", "pid": rank, "tid": 0, "args": {field: value}}
    for rank, name, track in lanes.names():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


class _Lanes:
    """Which track a phase lies on: one for each phase of a rank, and more of them where two would overlap.

    Two saves of one rank are never in one phase at once; but a wall clock that was set back lays them so.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        for verb, phases in _TRACKS.items():
            for phase in phases:
                self._numbers[verb, phase] = len(self._numbers) + 1
        self._ends: dict[tuple[int, str, str], list[tuple[float, int]]] = {}

    def track(self, rank: int, verb: str, phase: Phase, start_seconds: float) -> int:
        """Return the number of the track for a phase; phases of a rank are asked for as they began."""
        number = self._numbers.setdefault((verb, phase.name), len(self._numbers) + 1)
        ends = self._ends.setdefault((rank, verb, phase.name), [])
        begins = start_seconds + phase.start_seconds
        lane = len(ends)
        # Half a microsecond: what the text of a trace can still tell apart.
        if ends and ends[0][0] <= begins + 5e-7:
            _, lane = heapq.heappop(ends)
        heapq.heappush(ends, (start_seconds + phase.stop_seconds, lane))
        return number + 1000 * lane

    def names(self) -> Iterator[tuple[int, str, int]]:
        """Yield rank, name and number of every track that was used."""
        for (rank, verb, phase), ends in sorted(self._ends.items()):
            for lane in range(len(ends)):
                again = f" ({lane + 1})" if lane else ""
                yield rank, f"{verb}: {phase}{again}", self._numbers[verb, phase] + 1000 * lane


def _time_of(event: Fields) -> float:
    time = event["ts"]
    assert isinstance(time, float)
    return time


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
