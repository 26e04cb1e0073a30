"""What every trace must be, whatever it was made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.base.types.events import RankReport

SLACK = 0.01
"""Microseconds that rounding may move an event."""


def require_sound(document: Mapping[str, Any], reports: Sequence[RankReport]) -> None:
    """Require that a trace says what reports say: every phase once, as long as it was, and none over another."""
    events = document["traceEvents"]
    first = document["otherData"]["began_unix_seconds"]
    assert first == min(each.began_unix_seconds for each in reports)
    _require_named(events)
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    _require_apart(timed)
    spans = _spans(timed)
    assert len(spans) == len(reports)
    complete = [event for event in timed if event["ph"] == "X"]
    assert len(complete) == sum(len(each.phases) for each in reports)
    for report in reports:
        key = (report.operation.rank, report.operation.verb, report.id)
        start, stop, told = spans[key]
        assert abs(start - (report.began_unix_seconds - first) * 1e6) <= SLACK
        assert abs(stop - start - report.seconds * 1e6) <= SLACK
        assert told["bytes"] == report.bytes and told["host"] == report.host
        own = [each for each in complete if (each["pid"], each["cat"], each["args"]["id"]) == key]
        expected = sorted(
            (phase.name, start + phase.start_seconds * 1e6, phase.seconds * 1e6) for phase in report.phases
        )
        found = sorted((event["name"], event["ts"], event["dur"]) for event in own)
        for (name, ts, dur), (known, at, length) in zip(found, expected, strict=True):
            assert name == known
            assert abs(ts - at) <= 2 * SLACK and abs(dur - length) <= SLACK
            assert start - SLACK <= ts and ts + dur <= stop + 3 * SLACK, "a phase lies within its operation"


def _require_named(events: Sequence[Mapping[str, Any]]) -> None:
    """Require that every event lies on a track that has one name, in a process that has one."""
    named = [(each["pid"], each["tid"]) for each in events if each["ph"] == "M" and each["name"] == "thread_name"]
    assert len(named) == len(set(named))
    processes = [each["pid"] for each in events if each["ph"] == "M" and each["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    for each in events:
        assert each["pid"] in processes
        if each["ph"] == "X":
            assert (each["pid"], each["tid"]) in named


def _require_apart(timed: Sequence[Mapping[str, Any]]) -> None:
    tracks = defaultdict(list)
    for each in timed:
        if each["ph"] == "X":
            tracks[each["pid"], each["tid"]].append(each)
    for track in tracks.values():
        assert len({(each["cat"], each["name"]) for each in track}) == 1, "one track per phase"
        ends = 0.0
        for each in sorted(track, key=lambda each: (each["ts"], each["ts"] + each["dur"])):
            assert each["ts"] >= ends - 0.6, "phases on one track follow one another"
            ends = each["ts"] + each["dur"]


def _spans(timed: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str, str], tuple[float, float, Mapping[str, Any]]]:
    """Return start, stop and arguments of each operation, of which each has one beginning and one end."""
    begun: dict[tuple[int, str, str], Mapping[str, Any]] = {}
    spans = {}
    for each in timed:
        if each["ph"] == "X":
            continue
        verb, id = each["id2"]["local"].split("-")
        key = (each["pid"], verb, id)
        if each["ph"] == "b":
            assert key not in begun
            begun[key] = each
        else:
            assert each["ph"] == "e" and each["name"] == begun[key]["name"]
            spans[key] = (begun[key]["ts"], each["ts"], begun[key]["args"])
    assert len(spans) == len(begun)
    return spans
