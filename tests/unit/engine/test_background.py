"""Threads that wait for calls end when they are told to, and calls that follow start others."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from holdfast.clock import SystemClock
from holdfast.engine.background import CALLS, BackgroundQueue, DaemonCalls, WriteProgress, end_idle_threads


def named(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


def test_an_idle_queue_ends_its_thread_and_the_next_call_starts_another() -> None:
    calls = BackgroundQueue("queue-of-test", WriteProgress(SystemClock()))
    calls.end_if_idle()
    for number in range(3):
        assert calls.submit(lambda number=number: number).result(60) == number  # type: ignore[misc]
        assert len(named("queue-of-test")) == 1
        calls.end_if_idle()
        assert not named("queue-of-test")
    calls.submit(lambda: None).result(60)
    calls.close()
    calls.end_if_idle()
    assert not named("queue-of-test")


def test_a_call_that_goes_on_keeps_its_thread() -> None:
    calls, end = BackgroundQueue("busy-of-test", WriteProgress(SystemClock())), threading.Event()
    going = calls.submit(end.wait)
    behind = calls.submit(lambda: "behind")
    calls.end_if_idle()
    assert len(named("busy-of-test")) == 1 and not behind.done()
    end.set()
    assert (going.result(60), behind.result(60)) == (True, "behind")
    calls.close()


def test_idle_calls_end_but_not_those_that_go_on() -> None:
    calls, end = DaemonCalls(), threading.Event()
    threads: list[threading.Thread] = []

    def note(wait: bool) -> None:
        threads.append(threading.current_thread())
        if wait:
            end.wait(60)

    going: Future[None] = calls.submit(lambda: note(True))
    calls.submit(lambda: note(False)).result(60)
    calls.end_idle()
    assert [thread.is_alive() for thread in threads] == [True, False]
    end.set()
    going.result(60)
    calls.end_idle()
    assert not any(thread.is_alive() for thread in threads)
    calls.submit(lambda: note(False)).result(60)
    assert threads[-1] not in threads[:-1], "it is a new one"
    calls.end_idle()


def test_a_call_may_end_the_idle_threads_itself() -> None:
    CALLS.submit(end_idle_threads).result(60)
    assert CALLS.submit(lambda: 1).result(60) == 1
