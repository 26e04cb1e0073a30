"""Calls in order on a thread of their own, also where a signal handler comes in between."""

from __future__ import annotations

import threading

import pytest

from holdfast.clock import SystemClock
from holdfast.engine.background import BackgroundQueue, WriteProgress, are_done
from holdfast.interrupts import UnlockedFuture


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
