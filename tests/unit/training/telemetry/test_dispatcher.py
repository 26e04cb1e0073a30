"""Observers of a run: none of them can hurt a save, however slow or broken, and all hear everything in order."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.types.events import Event, Progress
from holdfast.errors import InvalidError
from holdfast.training.telemetry.dispatcher import QUEUED_MAX, EventDispatcher
from tests.unit.ranks import World, plain, saved

SOURCE = Path(__file__).resolve().parents[4] / "src"


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


class Raises(Heard):
    def on_event(self, event: Event) -> None:
        super().on_event(event)
        raise RuntimeError(f"event {len(self.events)}")


class Stuck:
    def __init__(self) -> None:
        self.released = threading.Event()

    def on_event(self, event: Event) -> None:
        self.released.wait(60.0)


def events(count: int) -> list[Event]:
    return [Progress(number, count) for number in range(count)]


def test_everybody_hears_everything_in_order() -> None:
    ears = [Heard(), Heard()]
    audience = EventDispatcher(ears, SystemClock())
    for each in events(1000):
        audience.dispatch(each)
    audience.close()
    assert [ear.events for ear in ears] == [events(1000), events(1000)]


def test_events_of_many_threads_all_arrive() -> None:
    ear = Heard()
    audience = EventDispatcher([ear], SystemClock())
    threads = [
        threading.Thread(target=lambda at=at: [audience.dispatch(Progress(at, n)) for n in range(200)])
        for at in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    audience.close()
    for at in range(8):
        assert [event.total_bytes for event in ear.events if event.done_bytes == at] == list(range(200))


def test_one_that_raises_is_told_on_and_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Raises(), Heard()
    audience = EventDispatcher([bad, good], SystemClock())
    with caplog.at_level(logging.WARNING):
        for each in events(5):
            audience.dispatch(each)
        audience.close()
    assert bad.events == good.events == events(5)
    (record,) = caplog.records
    assert "observer Raises failed" in record.message and "event 1" in record.message


def test_one_that_is_stuck_holds_nobody_up_and_what_it_missed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    stuck, good = Stuck(), Heard()
    audience = EventDispatcher([stuck, good], SystemClock(), drain_timeout_seconds=0.2)
    start = time.monotonic()
    try:
        with caplog.at_level(logging.WARNING):
            for each in events(3 * QUEUED_MAX):
                while len(good.events) < each.done_bytes - QUEUED_MAX // 2:
                    time.sleep(0.001)
                audience.dispatch(each)
            audience.close()
        assert time.monotonic() - start < 20.0
    finally:
        stuck.released.set()
    assert good.events == events(3 * QUEUED_MAX)
    (record,) = caplog.records
    assert "observer Stuck was too slow" in record.message
    assert str(3 * QUEUED_MAX - 1) in record.message, "it heard of one; the rest was lost to it"


def test_an_observer_that_cannot_hear_is_refused() -> None:
    with pytest.raises(InvalidError, match=r"observers: str has no method on_event\(event\)"):
        EventDispatcher(["log.jsonl"], SystemClock())  # type: ignore[list-item]


def test_nothing_is_told_after_the_end() -> None:
    ear = Heard()
    audience = EventDispatcher([ear], SystemClock())
    audience.close()
    audience.dispatch(Progress(1, 2))
    audience.close()
    assert ear.events == [] and not audience.has_observers


def test_the_last_events_are_heard_where_nobody_closes() -> None:
    code = (
        f"import sys, time; sys.path.insert(0, {str(SOURCE)!r})\n"
        "from holdfast.training.telemetry.dispatcher import EventDispatcher\n"
        "from holdfast.base.clock import SystemClock\n"
        "from holdfast.base.types.events import Progress\n"
        "class Slow:\n"
        "    def on_event(self, event):\n"
        "        time.sleep(0.05); print(event.done_bytes, flush=True)\n"
        "audience = EventDispatcher([Slow()], SystemClock())\n"
        "for number in range(10): audience.dispatch(Progress(number, 10))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.split() == [str(number) for number in range(10)]


def test_a_save_commits_beside_observers_that_are_stuck_and_that_raise() -> None:
    stuck, bad = Stuck(), Raises()
    world = World(2, observers=(stuck, bad))
    try:
        outcomes = world.play(lambda rank, run: saved(run, 1, {"w": plain(1.0)}))
    finally:
        stuck.released.set()
    assert [type(each).__name__ for each in outcomes] == ["SaveReport", "SaveReport"]
    assert world.committed() == [1]
    assert bad.events


def test_an_observer_that_wants_to_end_the_process_is_told_of_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    class Exits(Heard):
        def on_event(self, event: Event) -> None:
            super().on_event(event)
            sys.exit(3)

    exits = Exits()
    audience = EventDispatcher([exits], SystemClock())
    for event in events(3):
        audience.dispatch(event)
    audience.close()
    assert exits.events == events(3)
    assert "observer Exits failed" in caplog.text and "SystemExit" in caplog.text
