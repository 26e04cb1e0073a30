"""A drain as people see it: events, lines, counters and the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

import holdfast
from holdfast.base.types.events import Began, DrainSkipped, Ended, Entered, Event, Failed, Progress
from holdfast.errors import UnavailableError
from holdfast.observers import Observer, jsonl, prometheus
from holdfast.policies import LatestN
from holdfast.settings import Settings
from holdfast.stored.copying.step_drain import StepDrain
from holdfast.training.runs.tiers import drain as draining

SETTINGS = Settings(collect_grace_seconds=0.0)


class Seen:
    """An observer that keeps what it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of_drains(self) -> list[Event]:
        """Return the events of drains, in order; the progress once."""
        found: list[Event] = []
        for event in self.events:
            operation = getattr(event.report if isinstance(event, Ended) else event, "operation", None)
            is_again = isinstance(event, Progress) and any(isinstance(each, Progress) for each in found)
            if isinstance(event, DrainSkipped) or (
                operation is not None and operation.verb == "drain" and not is_again
            ):
                found.append(event)
        return found


def manager(folder: Path, *observers: Observer, **options: object) -> holdfast.CheckpointManager:
    options = {"every": 10, "preemption": False, "settings": SETTINGS, **options}
    return holdfast.CheckpointManager(
        folder / "root",
        process_group=False,
        observers=observers,
        near=holdfast.Tier(folder / "near", every=5, keep_last=2),
        **options,  # type: ignore[arg-type]
    )


def save(run: holdfast.CheckpointManager, step: int) -> holdfast.SaveHandle:
    handle = run.maybe_save(step, {"weights": torch.full((3000,), float(step))})
    assert handle is not None
    handle.wait("near")
    return handle


def test_observers_and_the_trace_see_a_drain(tmp_path: Path) -> None:
    seen, registry = Seen(), CollectorRegistry()
    with manager(tmp_path, seen, jsonl(tmp_path / "events.jsonl"), prometheus(registry=registry)) as run:
        save(run, 10).wait()
    began, sends, progress, waits, publishes, ended = seen.of_drains()
    assert isinstance(began, Began) and began.operation.name == "drain of step 10"
    assert began.operation.url.endswith("root/step-000000000010")
    assert [each.phase for each in (sends, waits, publishes) if isinstance(each, Entered)] == [
        "send",
        "wait",
        "publish",
    ]
    assert isinstance(progress, Progress) and progress.total_bytes >= 12_000
    assert isinstance(ended, Ended) and ended.report.bytes >= 12_000 and ended.report.bytes_per_second > 0
    assert [phase.name for phase in ended.report.phases] == ["send", "wait", "publish"]

    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (line,) = [each for each in lines if each["verb"] == "drain" and each["event"] == "ended"]
    assert line["files"] == ended.report.facts["files"] and line["files"] >= 3

    labels = {"verb": "drain", "rank": "0"}
    assert registry.get_sample_value("holdfast_operations_total", {**labels, "outcome": "done"}) == 1
    assert registry.get_sample_value("holdfast_operations_under_way", labels) == 0
    assert registry.get_sample_value("holdfast_bytes_total", labels) == ended.report.bytes

    trace = holdfast.api.trace(tmp_path / "root")
    assert (trace.saves, trace.drains) == (1, 1)
    events = trace.document["traceEvents"]
    assert isinstance(events, list)
    assert {event["name"] for event in events if event.get("cat") == "drain"} >= {"drain 10", "send", "publish"}


def test_a_skipped_step_and_a_failed_try_are_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, registry = Seen(), CollectorRegistry()
    lacking, is_away = StepDrain.lacking, True

    def fail_while_away(drain: StepDrain) -> object:
        if is_away:
            raise UnavailableError("the root is away")
        return lacking(drain)

    monkeypatch.setattr(StepDrain, "lacking", fail_while_away)
    monkeypatch.setattr(draining, "_RETRY_SECONDS", 0.05)
    with manager(tmp_path, seen, prometheus(registry=registry), keep=LatestN(1)) as run:
        save(run, 10)
        save(run, 20)
        is_away = False
    drains = seen.of_drains()
    failed = [each for each in drains if isinstance(each, Failed)]
    assert failed and {each.message for each in failed} == {"the root is away"}
    begun = [each for each in drains if isinstance(each, Began)]
    (ended,) = [each for each in drains if isinstance(each, Ended)]
    assert len(begun) == len(failed) + 1 and ended.report.operation.step == 20
    (skipped,) = [each for each in drains if isinstance(each, DrainSkipped)]
    assert skipped.step == 10 and "would not keep the step" in skipped.why
    assert registry.get_sample_value("holdfast_drain_skips_total", {"rank": "0"}) == 1
    assert holdfast.api.trace(tmp_path / "root").drains == 1
