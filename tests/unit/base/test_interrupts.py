"""Waits and results without a lock, and the one lock that a signal handler can see."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future, InvalidStateError, as_completed, wait

import pytest

from holdfast.base.interrupts import GUARD, Latch, UnlockedFuture, require_uninterrupted, start_thread
from holdfast.errors import UnavailableError


def test_a_latch_wakes_each_thread_that_waits_and_holds_up_none_that_comes_later() -> None:
    latch = Latch()
    assert not latch.wait(0.0) and not latch.wait(0.01) and not latch.is_set()
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(latch.wait(20.0))) for _ in range(5)]
    for thread in threads:
        thread.start()
    while len(latch._sleepers) < 5:
        pass
    latch.set()
    for thread in threads:
        thread.join(20.0)
    assert woken == [True] * 5 and latch.wait() and latch.is_set()
    latch.set()


def test_a_wait_of_a_thread_that_was_interrupted_under_the_lock_fails_and_one_of_another_thread_waits() -> None:
    latch, outcome = Latch(), UnlockedFuture[int]()
    with GUARD:
        with pytest.raises(UnavailableError, match="MainThread"):
            require_uninterrupted("save of step 3")
        with pytest.raises(UnavailableError, match="interrupted"):
            latch.wait(20.0)
        with pytest.raises(UnavailableError, match="interrupted"):
            outcome.result(20.0)
        waiting = threading.Thread(target=latch.wait)
        start_thread(waiting)
        while not latch._sleepers:
            pass
    require_uninterrupted("save of step 3")
    latch.set()
    waiting.join(20.0)
    assert not waiting.is_alive()


def test_an_outcome_is_set_once_and_tells_the_same_ever_after() -> None:
    outcome = UnlockedFuture[int]()
    with pytest.raises(TimeoutError):
        outcome.result(0.0)
    assert not outcome.done() and not outcome.cancel()
    outcome.set_result(7)
    with pytest.raises(InvalidStateError):
        outcome.set_result(8)
    with pytest.raises(InvalidStateError):
        outcome.set_exception(ValueError("late"))
    assert outcome.done() and outcome.result() == 7 and outcome.exception() is None

    failed, error = UnlockedFuture[int](), TimeoutError("of the call itself")
    failed.set_exception(error)
    assert failed.exception(0.0) is error
    with pytest.raises(TimeoutError, match="of the call itself"):
        failed.result()


def test_of_threads_that_end_it_at_once_one_wins() -> None:
    for _ in range(50):
        outcome, start, lost = UnlockedFuture[int](), threading.Barrier(4), list[int]()

        def end(
            number: int,
            outcome: UnlockedFuture[int] = outcome,
            start: threading.Barrier = start,
            lost: list[int] = lost,
        ) -> None:
            start.wait()
            try:
                outcome.set_result(number)
            except InvalidStateError:
                lost.append(number)

        threads = [threading.Thread(target=end, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted([*lost, outcome.result()]) == [0, 1, 2, 3]


def test_callbacks_run_once_in_order_whenever_they_are_added(caplog: pytest.LogCaptureFixture) -> None:
    outcome, told = UnlockedFuture[int](), list[object]()

    def fail(_: Future[int]) -> None:
        told.append("failed")
        raise ValueError("of a callback")

    outcome.add_done_callback(lambda ended: told.append(("first", ended.result(0.0))))
    outcome.add_done_callback(fail)
    outcome.add_done_callback(lambda ended: ended.add_done_callback(lambda _: told.append("added in a callback")))
    outcome.set_result(7)
    outcome.add_done_callback(lambda _: told.append("late"))
    assert told == [("first", 7), "failed", "added in a callback", "late"]
    assert "of a callback" in caplog.text


def test_the_standard_library_waits_for_it_as_for_any_future() -> None:
    outcome, failed = UnlockedFuture[int](), UnlockedFuture[int]()
    failed.set_exception(ValueError("no"))
    timer = threading.Timer(0.02, outcome.set_result, [7])
    timer.start()
    assert wait([outcome, failed], 20.0).done == {outcome, failed}
    assert set(as_completed([outcome, failed], 20.0)) == {outcome, failed}
    timer.join()

    async def awaited() -> int:
        later = UnlockedFuture[int]()
        threading.Timer(0.02, later.set_result, [9]).start()
        return await asyncio.wait_for(asyncio.wrap_future(later), 20.0)

    assert asyncio.run(awaited()) == 9


def test_a_thread_is_started_once() -> None:
    runs: list[int] = []
    thread = threading.Thread(target=lambda: runs.append(1))
    start_thread(thread)
    thread.join()
    start_thread(thread)
    assert runs == [1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_another_thread_holds_the_lock_can_take_it() -> None:
    is_held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with GUARD:
            is_held.set()
            ends.wait(0.1)

    holding = threading.Thread(target=hold)
    holding.start()
    is_held.wait()
    child = os.fork()
    if not child:
        other = threading.Thread(target=lambda: GUARD.acquire(timeout=20.0) and os._exit(7))
        other.start()
        other.join()
        os._exit(1)
    ends.set()
    holding.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    require_uninterrupted("the parent")
