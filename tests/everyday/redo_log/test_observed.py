"""A user watches a run with a redo log: its seals, an interruption, and the restart that goes on at the last step."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

import holdfast
from holdfast.api import list_steps, open_checkpoint
from holdfast.observers import Event, LogInterrupted, LogRedone, LogSealed, prometheus


class Seen:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def seals(self) -> list[LogSealed]:
        return [event for event in self.events if isinstance(event, LogSealed)]


class Run:
    """A training, made again at each start."""

    def __init__(self, manager: holdfast.CheckpointManager) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(30, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.manager = manager
        self.start = manager.load(self.state) or 0

    def step(self, step: int, *, is_sealed: bool = True) -> None:
        self.model(torch.full((2, 30), float(step))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        handle = self.manager.maybe_save(step, self.state)
        if handle is not None:
            handle.wait()
        deadline = time.monotonic() + 20
        while is_sealed and self.manager.recoverable != step:
            assert time.monotonic() < deadline, self.manager.recoverable
            time.sleep(0.002)


@contextmanager
def started(root: Path, *observers: object) -> Iterator[Run]:
    options = {"every": 1000, "process_group": False, "differential": True, "observers": observers}
    with holdfast.CheckpointManager(root, **options) as manager:  # type: ignore[arg-type]
        yield Run(manager)


def test_a_run_and_its_restart_are_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen, registry = Seen(), CollectorRegistry()
    with started(tmp_path, seen, prometheus(registry=registry)) as run:
        for step in range(1, 7):
            run.step(step)
    assert [(seal.step, seal.records, seal.rank) for seal in seen.seals()] == [(step, 1, 0) for step in range(2, 7)]
    assert seen.seals()[-1].recoverable == 6

    def value(name: str) -> float | None:
        return registry.get_sample_value(name, {"rank": "0"})

    (log,) = list_steps(tmp_path).logs
    assert sum(seal.bytes for seal in seen.seals()) == log.bytes == value("holdfast_log_bytes_total")
    assert (value("holdfast_recoverable_step"), value("holdfast_log_wait_seconds_total")) == (6, 0)
    assert (log.base, log.reach) == (1, 6)
    assert open_checkpoint(tmp_path, step=1).log == log

    again = Seen()
    with caplog.at_level(logging.INFO), started(tmp_path, again) as run:
        report = run.manager.load_report
    assert run.start == 6
    assert report is not None and 0 < report.redo_seconds < report.seconds
    (redone,) = (event for event in again.events if isinstance(event, LogRedone))
    assert (redone.step, redone.base, redone.records, redone.rank) == (6, 1, 5, 0)
    assert redone.seconds == report.redo_seconds
    assert re.search(r"step 6: base 1 and 5 records redone in [\d.]+ m?s", caplog.text)


def test_a_load_of_a_base_alone_says_nothing_of_a_redo(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(tmp_path) as run:
        run.step(1)
    seen = Seen()
    with caplog.at_level(logging.INFO), started(tmp_path, seen) as run:
        report = run.manager.load_report
    assert run.start == 1 and report is not None and report.redo_seconds == 0
    assert not [event for event in seen.events if isinstance(event, LogRedone)]
    assert "redone" not in caplog.text


def test_an_interruption_is_seen_and_a_lower_step_begins_another_log(tmp_path: Path) -> None:
    seen = Seen()
    with started(tmp_path, seen) as run:
        for step in range(1, 5):
            run.step(step)
        run.step(3)
        run.step(4)
    (interrupted,) = (event for event in seen.events if isinstance(event, LogInterrupted))
    assert (interrupted.step, interrupted.rank) == (3, 0)
    assert interrupted.why == "step 3 follows step 4; expected rising steps"
    # The records after the first base 3 are of another log than the second base 3.
    logs = list_steps(tmp_path).logs
    assert [(log.base, log.steps) for log in logs] == [(3, (4,)), (1, (2,))]
    assert logs[0].id != logs[1].id


def test_records_after_an_uncommitted_base_are_not_recoverable(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        for step in range(1, 5):
            run.step(step)
        log = run.manager._redo_log
        assert log is not None
        log._interrupt(5, "because")
        note, log.bases.note = log.bases.note, lambda step, committed: None  # type: ignore[method-assign]
        committed = run.manager.save(6, run.state)
        committed.wait()
        run.step(7, is_sealed=False)
        assert log._writer.drain()
        assert run.manager.recoverable == 4
        note(6, committed.committed)
        assert run.manager.recoverable == 7
