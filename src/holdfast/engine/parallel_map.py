"""Several small calls at a store at once, their results in order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

CALLS_AT_ONCE = 16
"""Enough to hide what a disk or a network takes to answer, few enough for a pool of connections."""


def ordered_parallel_map(
    act: Callable[[_Item], _Result], items: Iterable[_Item], calls_at_once: int = CALLS_AT_ONCE
) -> Iterator[_Result]:
    """Yield what `act` returns for each item, in their order, with several calls at once and as many results waiting.

    One item is acted on by the caller's own thread.

    Raises:
        Exception: What the first call that failed raised; calls that had not begun by then are not made.
    """
    waiting = iter(items)
    first = list(islice(waiting, 2))
    if len(first) < 2:
        yield from map(act, first)
        return
    calls = _Calls(act, calls_at_once)
    under_way = deque(map(calls.begin, first))
    try:
        under_way.extend(map(calls.begin, islice(waiting, 2 * calls_at_once)))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(map(calls.begin, islice(waiting, 1)))
    finally:
        for each in under_way:
            each.cancel()
        calls.end()


class _Calls(Generic[_Item, _Result]):
    """Threads that make calls, as many as there are calls to make at once; whoever asks for results outlives them.

    Threads of our own rather than an executor's: those take no work once the interpreter is about to exit, and a save
    under way is to be finished then.
    """

    def __init__(self, act: Callable[[_Item], _Result], calls_at_once: int) -> None:
        self._act, self._calls_at_once = act, calls_at_once
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[_Item, Future[_Result]] | None] = queue.SimpleQueue()
        self._threads = self._idle = 0

    def begin(self, item: _Item) -> Future[_Result]:
        """Have a call made; return what will hold its result."""
        call: Future[_Result] = Future()
        with self._lock:
            self._waiting.put((item, call))
            if self._waiting.qsize() <= self._idle or self._threads == self._calls_at_once:
                return call
            self._threads += 1
            self._idle += 1
        try:
            threading.Thread(target=self._work, name="holdfast-store", daemon=True).start()
        except RuntimeError:
            # The host has no thread to spare, or the interpreter is exiting (Python 3.12.0 starts none then).
            with self._lock:
                self._threads -= 1
                self._idle -= 1
            # Threads that could be started may take it, and what came before it, at any time.
            with suppress(queue.Empty):
                while not call.done():
                    self._make(self._waiting.get_nowait())
        return call

    def end(self) -> None:
        """Have every thread end once it is done with what it has begun."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            with self._lock:
                self._idle -= 1
            self._make(waiting)
            with self._lock:
                self._idle += 1

    def _make(self, waiting: tuple[_Item, Future[_Result]] | None) -> None:
        assert waiting is not None, "nothing begins once all is over"
        item, call = waiting
        if call.set_running_or_notify_cancel():
            try:
                call.set_result(self._act(item))
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                call.set_exception(error)
