"""Calls in order on a thread of their own: signal handlers in between, and threads that end when they are idle."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from holdfast.base.clock import SystemClock
from holdfast.base.interrupts import UnlockedFuture
from holdfast.core.engine.background import (
    DAEMON_POOL,
    BackgroundQueue,
    DaemonCalls,
    WriteProgress,
    are_done,
    end_idle_threads,
)


def new_queue() -> BackgroundQueue:
    return BackgroundQueue("holdfast-test", WriteProgress(SystemClock()))


def test_calls_are_made_in_order_on_one_thread_until_the_close() -> None:
    calls, made = new_queue(), list[tuple[int, int]]()
    futures = [
        calls.submit(lambda number=number: made.append((number, threading.get_ident())))  # type: ignore[misc]
        for number in range(20)
    ]
    calls.close()
    assert [number for number, _ in made] == list(range(20)) and len({thread for _, thread in made}) == 1
    assert made[0][1] != threading.get_ident() and all(future.done() for future in futures) and calls.is_idle
    with pytest.raises(RuntimeError, match="the queue is closed"):
        calls.submit(lambda: None)


def test_a_queue_without_calls_closes_at_once_and_starts_no_thread() -> None:
    calls = new_queue()
    calls.close()
    assert calls._thread.ident is None


@pytest.mark.parametrize("is_started", [False, True])
def test_a_call_whose_submit_is_interrupted_by_a_close_is_made(is_started: bool) -> None:
    calls, made = new_queue(), list[int]()
    if is_started:
        calls.submit(lambda: made.append(0)).result(20.0)

    inside = calls._calls

    class Interrupted:
        """The queue of the thread. A signal handler closes it right before a call is put."""

        get_nowait = inside.get_nowait

        def put(self, call: object) -> None:
            if call is not None and not calls._closed.is_set():
                calls.close()
            inside.put(call)  # type: ignore[arg-type]

    calls._calls = Interrupted()  # type: ignore[assignment]
    future = calls.submit(lambda: made.append(1))
    assert future.done() and made == [0, 1][not is_started :]
    assert not calls._thread.is_alive()


def test_a_wait_for_several_ends_with_the_last_or_the_limit() -> None:
    clock, first, last = SystemClock(), UnlockedFuture[int](), UnlockedFuture[int]()
    first.set_exception(TimeoutError("of the call itself"))
    assert not are_done([first, last], 0.01, clock)
    timer = threading.Timer(0.02, last.set_result, [1])
    timer.start()
    assert are_done([first, last], 20.0, clock) and are_done([], 0.0, clock)
    timer.join()


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
    calls, begun, end = DaemonCalls(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def note(wait: bool) -> None:
        threads.append(threading.current_thread())
        begun.set()
        if wait:
            end.wait(60)

    going: Future[None] = calls.submit(lambda: note(True))
    assert begun.wait(60)
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
    DAEMON_POOL.submit(end_idle_threads).result(60)
    assert DAEMON_POOL.submit(lambda: 1).result(60) == 1


@pytest.mark.parametrize("where", ["before the put", "after the end was asked for", "as another thread"])
def test_no_call_is_lost_where_the_idle_thread_ends_beside_it(where: str) -> None:
    calls, made = new_queue(), list[int]()
    calls.submit(lambda: made.append(0)).result(20.0)
    inside = calls._calls

    class Between:
        """The queue of the thread. Something comes between a look and a put, once."""

        get, get_nowait, empty = inside.get, inside.get_nowait, inside.empty

        def put(self, message: object) -> None:
            is_call, calls._calls = isinstance(message, tuple), inside
            if is_call and where == "before the put":
                calls.end_if_idle()
            inside.put(message)  # type: ignore[arg-type]
            if not is_call:
                assert where != "before the put"
                calls.submit(lambda: made.append(1)).result(20.0)

    calls._calls = Between()  # type: ignore[assignment]
    if where == "before the put":
        calls.submit(lambda: made.append(1)).result(20.0)
    elif where == "as another thread":
        ending = threading.Thread(target=calls.end_if_idle)
        ending.start()
        ending.join(20.0)
        assert not ending.is_alive()
    else:
        calls.end_if_idle()
    calls.submit(lambda: made.append(2)).result(20.0)
    calls.close()
    assert made == [0, 1, 2] and not named("holdfast-test")


def test_threads_that_end_when_idle_lose_no_call_of_another_thread() -> None:
    calls, stop = new_queue(), threading.Event()

    def end_again_and_again() -> None:
        while not stop.is_set():
            calls.end_if_idle()

    ending = threading.Thread(target=end_again_and_again)
    ending.start()
    assert [calls.submit(lambda number=number: number).result(20.0) for number in range(2000)] == list(range(2000))  # type: ignore[misc]
    stop.set()
    ending.join(20.0)
    calls.close()
    assert not ending.is_alive()
