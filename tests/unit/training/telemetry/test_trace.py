"""Traces: whatever reports say, the tracks nest, lengths are the reports', and every event belongs to a track."""

from __future__ import annotations

import json
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.memory import MemoryStore
from holdfast.base.types.events import Operation, Phase, RankReport
from holdfast.core.format.digest import hex_digest_of
from holdfast.errors import MissingError
from holdfast.stored.repository.reports import encode_reports, put_reports
from holdfast.training.telemetry import trace as tracing
from holdfast.training.telemetry.trace import trace_document, trace_of
from tests.unit.training.telemetry.traced import require_sound

lengths = st.integers(0, 5_000_000).map(lambda microseconds: microseconds / 1e6)


@st.composite
def reports(draw: st.DrawFn) -> list[RankReport]:
    """Operations of some ranks, on clocks that may have been set back between them."""
    made = []
    for number in range(draw(st.integers(1, 6))):
        verb = draw(st.sampled_from(["save", "load"]))
        names = st.sampled_from(["write", "wait", "plan", "something new"])
        phases = draw(st.lists(st.builds(Phase, names, lengths, lengths), max_size=5))
        seconds = max([each.stop_seconds for each in phases], default=0.0)
        phases.sort(key=lambda each: each.start_seconds)
        operation = Operation(verb, draw(st.none() | st.integers(0, 99)), "x", draw(st.integers(0, 2)), 3)
        began = draw(st.integers(0, 10_000_000)) / 1e6 + 1.7e9
        made.append(RankReport(operation, f"{number:016x}", "host", 1, began, seconds, tuple(phases), 10))
    return made


@given(made=reports())
def test_tracks_nest_and_lengths_are_those_of_the_reports(made: list[RankReport]) -> None:
    require_sound(json.loads(json.dumps(trace_document(made), allow_nan=False)), made)


def test_a_checkpoint_and_a_run_are_traced_alike() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    for step in (1, 2):
        for rank in range(2):
            operation = Operation("save", step, f"{store.url}/step-{step:012d}", rank, 2)
            phases = (Phase("write", 0.0, 1.0),)
            report = RankReport(operation, f"{step:016x}", f"host{rank}", 1, 100.0 * step, 1.5, phases, 10)
            put_reports(store, f"step-{step:012d}/", [report])
    store.put(f"step-{2:012d}/reports/load-{'0' * 16}-r00000.json", b"half")
    trace = trace_of(store)
    assert (trace.saves, trace.loads, trace.ranks) == (2, 0, 2)
    assert [key for key, _ in trace.unreadable] == [f"step-{2:012d}/reports/load-{'0' * 16}-r00000.json"]


def test_without_reports_there_is_no_trace() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    with pytest.raises(MissingError, match=r"no reports of a save or load.*settings\.reports"):
        trace_of(store)
    store.put(f"reports/load-{'0' * 16}-r00000.json", b"half")
    with pytest.raises(MissingError, match="1 are stored, none can be read"):
        trace_of(store)


@pytest.mark.parametrize("fact", ["1e999", "NaN", "9" * 400])
def test_numbers_that_no_trace_can_hold_are_damage(fact: str) -> None:
    store = MemoryStore(uuid.uuid4().hex)
    report = RankReport(Operation("save", None, "x", 0, 1), "0" * 16, "host", 1, 1.0, 1.0, (), 10, {"x": 123456})
    for number, (old, new) in enumerate([("123456", fact), ('"seconds": 1.0', f'"seconds": {fact}')]):
        body = encode_reports([report]).decode().rpartition(',\n "digest"')[0].replace(old, new, 1).encode()
        assert new.encode() in body
        sealed_anew = body + b',\n "digest": "' + hex_digest_of(body).encode() + b'"\n}\n'
        store.put(f"reports/save-{number:016x}-r00000.json", sealed_anew)
    with pytest.raises(MissingError, match="2 are stored, none can be read"):
        trace_of(store)


def test_what_took_no_time_at_all_is_traced() -> None:
    phases = (Phase("write", 0.0, 1e-320),)
    report = RankReport(Operation("save", None, "x", 0, 1), "0" * 16, "host", 1, 1.0, 1.0, phases, 1 << 62)
    json.dumps(trace_document([report]), allow_nan=False)


def test_a_trace_of_phases_that_all_overlap_is_soon_made() -> None:
    phases = (Phase("write", 0.0, 1e11),) * 10_000
    operation = Operation("save", None, "x", 0, 1)
    made = [RankReport(operation, f"{n:016x}", "host", 1, 1.0, 1.0, phases, 1) for n in range(4)]
    began = time.monotonic()
    trace_document(made)
    assert time.monotonic() - began < 15, "tracks are looked through one by one"


def test_more_than_a_trace_holds_leaves_the_oldest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EVENTS_MAX", 5)
    store = MemoryStore(uuid.uuid4().hex)
    for step in (1, 2, 3):
        operation = Operation("save", step, f"{store.url}/step-{step:012d}", 0, 1)
        phases = (Phase("write", 0.0, 1.0),) * 2
        report = RankReport(operation, f"{step:016x}", "host", 1, 1.0, 1.5, phases, 10)
        put_reports(store, f"step-{step:012d}/", [report])
    trace = trace_of(store)
    assert trace.saves == 2
    assert trace.left_out_from == f"step-{1:012d}/"
