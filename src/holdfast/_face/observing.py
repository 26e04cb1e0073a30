"""The public functions that look at a run again and again: its reports, its alerts, its work under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from holdfast._face import wiring
from holdfast.base.clock import SystemClock
from holdfast.base.types.events import RankReport
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError
from holdfast.settings import Settings
from holdfast.stored.repository.near_tier import read_near
from holdfast.stored.repository.reports import reports_in
from holdfast.stored.repository.two_roots import places_of
from holdfast.training.runs.watch import RunWatch
from holdfast.training.telemetry.alerts import USUAL, WINDOW_MAX, Alert, AlertRules
from holdfast.training.telemetry.event_lines import EventLines


def watch_run(
    root: wiring.Path, *, events: Iterable[str] = (), settings: Settings = wiring.DEFAULT_SETTINGS
) -> RunWatch:
    """Return a watch over a run, which reads news alone and writes nothing. Needs no torch.

    Example:
        watch = holdfast.api.watch_run("run-7")
        print(len(watch.refresh().steps), watch.writer, watch.under_way())
    Args:
        root: The folder of the run.
        events: Files of lines that `holdfast.observers.jsonl` writes; lines on other runs are left out.
        settings: How to reach storage.
    Raises:
        MissingError: There is no such file of events.
    """
    store = wiring.run_of(wiring.store_at(root, settings), settings)
    places = [each.url for each in places_of(store)]
    with suppress(CheckpointError):
        # The near tier may be on another host, and its events here.
        places += [near.url] if (near := read_near(places_of(store)[0])) is not None else []
    return RunWatch(store, SystemClock(), EventLines(events, places))


def alerts(
    root: wiring.Path,
    *,
    rules: AlertRules | None = None,
    events: Iterable[str] = (),
    settings: Settings = wiring.DEFAULT_SETTINGS,
) -> list[Alert]:
    """Return the alerts of a run: stalled, slow, failing, damaged and others. Read-only, needs no torch.

    Example:
        for alert in holdfast.api.alerts("run-7", rules=holdfast.api.AlertRules(slow_rank_seconds=5)):
            print(alert.rule, alert.step, alert.rank, alert.text, alert.act)
    Args:
        root: The folder of the run.
        rules: The thresholds; None for the defaults.
        events: Files of lines that `holdfast.observers.jsonl` writes: they tell which saves failed, and why.
        settings: How to reach storage.
    Raises:
        MissingError: The path holds no run, or there is no such file of events.
        InvalidError: The path is one checkpoint.
        UnavailableError: Storage failed.
    """
    watch = watch_run(root, events=events, settings=settings)
    watch.refresh()
    watch.read_saves(WINDOW_MAX + USUAL)
    return watch.alerts(rules or AlertRules())


def reports(
    path: wiring.Path, step: int | None = None, *, settings: Settings = wiring.DEFAULT_SETTINGS
) -> Iterator[tuple[str, RankReport | CheckpointError]]:
    """Yield the reports of saves, loads and drains beside a checkpoint by key; for an unreadable one the error.

    Example:
        for key, report in holdfast.api.reports("run-7", 300):
            print(key, report)
    Args:
        path: The checkpoint; with `step` the root of a run.
        step: The step of the run.
        settings: How to reach storage.
    Raises:
        CheckpointError: The folder cannot be listed.
    """
    store = wiring.store_at(path, settings)
    if step is None:
        return reports_in(store, "")
    return reports_in(wiring.run_of(store, settings), step_folder(step))
