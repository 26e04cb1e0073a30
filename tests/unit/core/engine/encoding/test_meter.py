"""What a save measures: writes that overlap count their time once, and each chunk counts for its kind."""

from __future__ import annotations

import threading

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.types.coding import Coded, Kind
from holdfast.core.engine.encoding.meter import SaveMeter

WEIGHTS, MOMENTS = Kind("bfloat16", "parameter"), Kind("float32", "exp_avg")
KINDS = {"model.a": WEIGHTS, "model.b": WEIGHTS, "optimizer.state.a.exp_avg": MOMENTS}


class HandedClock(SystemClock):
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def monotonic_seconds(self) -> float:
        return self.now

    def thread_seconds(self) -> float:
        return self.worked


def test_writes_that_overlap_count_their_time_once() -> None:
    clock = HandedClock()
    meter = SaveMeter(clock, KINDS)
    with meter.saving():
        clock.now = 1.0
        with meter.writing(100):
            clock.now = 2.0
            with meter.writing(50):
                clock.now = 4.0
        clock.now = 10.0
        with meter.writing(10):
            clock.now = 10.5
    measured = meter.measured()
    assert (measured.written_bytes, measured.write_seconds, measured.seconds) == (160, 3.5, 10.5)


def test_a_write_that_failed_took_time_and_no_bytes() -> None:
    clock = HandedClock()
    meter = SaveMeter(clock, KINDS)
    with pytest.raises(OSError, match="full"), meter.writing(100):
        clock.now = 2.0
        raise OSError("full")
    assert (meter.measured().written_bytes, meter.measured().write_seconds) == (0, 2.0)


def test_chunks_count_for_their_kind() -> None:
    meter = SaveMeter(SystemClock(), KINDS)
    meter.note_chunk("model.a", "planes", 100, 60, 0.5, 1.0)
    meter.note_chunk("model.b", "", 50, 50, 0.25, 0.5)
    meter.note_sample("optimizer.state.a.exp_avg", "planes", 10, 9, 0.125, 0.3)
    meter.note_chunk("left.out", "planes", 1000, 1, 1.0, 1.0)
    measured = meter.measured()
    assert measured.coded == {WEIGHTS: Coded(150, 110, 0.75, 1.5, {"planes": 100, "": 50})}
    assert measured.coded[WEIGHTS].codec == "planes"
    assert measured.probed == {MOMENTS: Coded(10, 9, 0.125, 0.125, {"planes": 10})}
    assert (measured.processor_seconds, measured.probe_seconds) == (1.75, 0.3)


def test_processor_time_is_that_of_the_thread() -> None:
    clock = HandedClock()
    meter = SaveMeter(clock, KINDS)
    with meter.working():
        clock.worked = 0.5
    with meter.writing(1):
        clock.worked = 0.75
    assert meter.measured().processor_seconds == 0.75


def test_threads_lose_no_count() -> None:
    meter = SaveMeter(SystemClock(), KINDS)

    def count() -> None:
        for _ in range(500):
            with meter.writing(3):
                meter.note_chunk("model.a", "planes", 2, 1, 0.0, 0.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured = meter.measured()
    assert measured.written_bytes == 6000 and measured.coded[WEIGHTS].raw_bytes == 4000
    assert measured.write_seconds > 0
