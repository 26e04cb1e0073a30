"""Several small calls at once, their results in order; and the threads that make them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeVar

from holdfast.base.interrupts import start_thread

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

CALLS_AT_ONCE = 16
"""Enough to hide the latency of a disk or a network, few enough for a pool of connections."""


def ordered_parallel_map(
    act: Callable[[_Item], _Result], items: Iterable[_Item], calls_at_once: int = CALLS_AT_ONCE
) -> Iterator[_Result]:
    """Yield what `act` returns for each item, in their order, with several calls at once and as many results waiting.

    The caller's own thread handles a single item.

    Raises:
        Exception: What the first call that failed raised; calls that had not begun by then are not made.
    """
    waiting = iter(items)
    first = list(islice(waiting, 2))
    if len(first) < 2:
        yield from map(act, first)
        return
    threads = WorkerThreads(calls_at_once, "holdfast-store")
    begin = partial(threads.submit, act)
    under_way = deque(map(begin, first))
    try:
        under_way.extend(map(begin, islice(waiting, 2 * calls_at_once)))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(map(begin, islice(waiting, 1)))
    finally:
        for future in under_way:
            future.cancel()
        threads.end()


def _complete(future: Future[_Result], call: Callable[[], _Result]) -> None:
    """Make a call and store its result or error in `future`, unless that was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)


class WorkerThreads:
    """Threads that make calls: one for each unfinished call, up to a maximum.

    Not an executor: its threads take no work once the interpreter is about to exit, and a save under way must be
    finished then. The threads are daemons, so an iterator that is dropped half-way cannot keep the interpreter from
    exiting; a caller that needs every call to be made calls `join`. One thread calls `begin`, `end` and `join`.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        """Start no thread yet."""
        self._threads_max, self._name = threads_max, name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # For `begin` and the threads of this map or pool. No other save or load waits for these threads.
        self._lock = threading.Lock()
        self._unfinished = 0

    def begin(self, call: Callable[[], None]) -> None:
        """Let a thread make a call, which must not raise."""
        with self._lock:
            self._unfinished += 1
            needed = min(self._unfinished, self._threads_max)
        self._calls.put(call)
        if len(self._threads) >= needed:
            return
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            start_thread(thread)
        except RuntimeError:
            # The host has no thread to spare, or the interpreter is exiting (Python 3.12.0 starts none then): this
            # thread makes the calls that no other one has taken.
            with suppress(queue.Empty):
                while True:
                    self._make(self._calls.get_nowait())
        else:
            self._threads.append(thread)

    def submit(self, act: Callable[..., _Result], *arguments: object) -> Future[_Result]:
        """Let a thread make a call; return its future, which may be cancelled until then."""
        future: Future[_Result] = Future()
        self.begin(partial(_complete, future, partial(act, *arguments)))
        return future

    def end(self) -> None:
        """Let every thread end once all calls are made."""
        for _ in self._threads:
            self._calls.put(None)

    def join(self) -> None:
        """Return once all calls are made and all threads have ended; later calls get new threads."""
        self.end()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def stop(self) -> None:
        """Make no call that no thread has begun, and return once all others are made."""
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        self.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._make(call)

    def _make(self, call: Callable[[], None] | None) -> None:
        assert call is not None, "no call begins after the end"
        call()
        with self._lock:
            self._unfinished -= 1
