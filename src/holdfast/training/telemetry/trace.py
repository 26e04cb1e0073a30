"""Reports of saves, loads and drains as a trace of each rank's phases, for Perfetto and chrome://tracing.

Source: Trace Event Format, "Complete Events" (`X`), "Async Events" (`b`, `e`) and "Metadata Events" (`M`), as
ui.perfetto.dev and chrome://tracing read it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from holdfast.base.ports.store import Store
from holdfast.base.types.events import Phase, RankReport
from holdfast.core.format.names import MANIFEST_FILE, step_folder
from holdfast.errors import CheckpointError, MissingError
from holdfast.stored.repository.catalog import exists, step_folders
from holdfast.stored.repository.reports import REPORTS_FOLDER, reports_in

Fields = dict[str, object]

_SAVING = ("collect", "agree", "plan", "compare", "replicas", "copy", "fence", "write", "queue", "part", "vote", "wait")
_COMMITTING = ("index", "publish", "sweep")
_TRACKS = {
    "save": (*_SAVING, *_COMMITTING),
    "drain": ("send", "wait", "publish"),
    "load": ("resolve", "plan", "agree", "exchange", "read", "restore", "wait"),
}
"""The phases of each verb, in the order of their tracks from top to bottom."""

EVENTS_MAX = 500_000
"""About how many phases and reports one trace holds: a browser has to draw it, and it is built in memory."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one checkpoint, or of all steps of a run."""

    document: Fields
    """The trace as a JSON document."""

    saves: int
    """Number of saves, each counted once for all its ranks."""

    loads: int
    """Number of loads, counted likewise."""

    drains: int
    """Number of drains of a step to the root, counted likewise."""

    ranks: int
    """Number of ranks with a report."""

    unreadable: tuple[tuple[str, CheckpointError], ...]
    """Keys of reports that cannot be read, each with its error."""

    left_out_from: str | None = None
    """The newest folder whose reports are left out because the trace is full; all older folders are left out too."""


def trace_of(store: Store, folder: str | None = None) -> Trace:
    """Return the trace of a checkpoint, or of every step of a run.

    Args:
        store: The checkpoint or the root.
        folder: One step of the root; None for all.
    Raises:
        MissingError: No report is stored, or none can be read.
    """
    folders = [] if folder is None else [folder]
    folders = folders or ([""] if exists(store, MANIFEST_FILE) else [])
    folders = folders or [step_folder(step) for step in step_folders(store)] or [""]
    reports: list[RankReport] = []
    unreadable: list[tuple[str, CheckpointError]] = []
    events, left_out_from = 0, None
    newest_first = ((folder, *stored) for folder in reversed(folders) for stored in reports_in(store, folder))
    for folder, key, report in newest_first:
        if events > EVENTS_MAX:
            left_out_from = folder
            break
        events += 1
        if isinstance(report, RankReport):
            reports.append(report)
            events += len(report.phases)
        else:
            unreadable.append((key, report))
    if not reports:
        damaged = f"; {len(unreadable)} are stored, none can be read: {unreadable[0][1]}" if unreadable else ""
        raise MissingError(
            f"{store.url}: no reports of a save or load; expected a checkpoint or the root of a run, with files under "
            f"{REPORTS_FOLDER}{damaged}. Save or load with settings.reports=True (format 1.2 or later) to store some"
        )
    verbs = Counter(verb for verb, _ in {(report.operation.verb, report.id) for report in reports})
    return Trace(
        document=trace_document(reports),
        saves=verbs["save"],
        loads=verbs["load"],
        drains=verbs["drain"],
        ranks=len({report.operation.rank for report in reports}),
        unreadable=tuple(unreadable),
        left_out_from=left_out_from,
    )


def trace_document(reports: Sequence[RankReport]) -> Fields:
    """Return reports as a trace: one process per rank, one track per phase, and the operations above them.

    The wall clocks of the hosts align the ranks with each other. Within one operation of a rank, one monotonic clock
    gives all durations. Times are in microseconds since the first report began.
    """
    first = min(report.began_unix_seconds for report in reports)
    ordered = sorted(reports, key=lambda report: (report.operation.rank, report.began_unix_seconds))
    lanes = _Lanes()
    events = [event for report in ordered for event in _events(report, first, lanes)]
    events.sort(key=itemgetter("ts"))
    ranks = {report.operation.rank: report.host for report in ordered}
    return {
        "displayTimeUnit": "ms",
        "otherData": {"began_unix_seconds": first},
        "traceEvents": [*_names(ranks, lanes), *events],
    }


def _events(report: RankReport, first: float, lanes: _Lanes) -> Iterator[Fields]:
    operation = report.operation
    rank, verb = operation.rank, operation.verb
    start = report.began_unix_seconds - first
    common: Fields = {"cat": verb, "pid": rank, "tid": 0, "id2": {"local": f"{verb}-{report.id}"}}
    arguments = {"id": report.id, "host": report.host, "pid": report.pid, "bytes": report.bytes}
    # An operation of zero seconds has infinite bandwidth, which JSON cannot hold.
    arguments |= {"bytes_per_second": round(min(report.bytes_per_second, 1e18)), **report.facts}
    if report.codings:
        arguments["codings"] = {each.kind: f"{each.codec or 'raw'}: {each.why}" for each in report.codings}
    name = verb if operation.step is None else f"{verb} {operation.step}"
    yield {"ph": "b", "name": name, "ts": _microseconds(start), **common, "args": arguments}
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
    yield {"ph": "e", "name": name, "ts": _microseconds(start + report.seconds), **common}


def _names(ranks: dict[int, str], lanes: _Lanes) -> Iterator[Fields]:
    for rank, host in ranks.items():
        for field, value in (("name", f"rank {rank}"), ("labels", host), ("sort_index", rank)):
            yield {"ph": "M", "name": f"process_{field}", "pid": rank, "tid": 0, "args": {field: value}}
    for rank, name, track in lanes.names():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


class _Lanes:
    """Assigns tracks: one for each phase of a rank, and further ones if two phases of one name overlap.

    Two saves of one rank never run the same phase at once. A wall clock that was set back makes it look so.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        for verb, phases in _TRACKS.items():
            for phase in phases:
                self._numbers[verb, phase] = len(self._numbers) + 1
        self._ends: dict[tuple[int, str, str], list[tuple[float, int]]] = {}

    def track(self, rank: int, verb: str, phase: Phase, start_seconds: float) -> int:
        """Return the number of the track for a phase. Call it for the phases of a rank in order of their start."""
        number = self._numbers.setdefault((verb, phase.name), len(self._numbers) + 1)
        ends = self._ends.setdefault((rank, verb, phase.name), [])
        begins = start_seconds + phase.start_seconds
        lane = len(ends)
        # Half a microsecond of tolerance: the trace rounds times, and phases that only touch share a track.
        if ends and ends[0][0] <= begins + 5e-7:
            _, lane = heapq.heappop(ends)
        heapq.heappush(ends, (start_seconds + phase.stop_seconds, lane))
        return number + 1000 * lane

    def names(self) -> Iterator[tuple[int, str, int]]:
        """Yield rank, name and number of every track in use."""
        for (rank, verb, phase), ends in sorted(self._ends.items()):
            for lane in range(len(ends)):
                suffix = f" ({lane + 1})" if lane else ""
                yield rank, f"{verb}: {phase}{suffix}", self._numbers[verb, phase] + 1000 * lane


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
