"""Several small calls at a store at once, their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


CALLS_AT_ONCE = 16
"""Enough to hide what a disk or a network takes to answer, few enough for a pool of connections."""


def each_in_flight(act: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield what `act` returns for each item, in their order, with several calls at once and as many results waiting.

    One item is acted on by the caller's own thread.

    Raises:
        Exception: What the first call that failed raised, once those under way have ended; no further one begins.
    """
    waiting = iter(items)
    first = list(islice(waiting, 2))
    if len(first) < 2:
        yield from map(act, first)
        return
    with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="holdfast-store") as threads:
        under_way: deque[Future[_Result]] = deque(threads.submit(act, item) for item in first)
        try:
            under_way.extend(threads.submit(act, item) for item in islice(waiting, 2 * CALLS_AT_ONCE))
            while under_way:
                yield under_way.popleft().result()
                under_way.extend(threads.submit(act, item) for item in islice(waiting, 1))
        finally:
            for each in under_way:
                each.cancel()
