"""Several calls at once: results in order, no further call after a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.core.engine.parallel_map import CALLS_AT_ONCE, ordered_parallel_map


def test_results_come_in_order_and_several_calls_at_once() -> None:
    met = threading.Barrier(CALLS_AT_ONCE, timeout=30)

    def act(number: int) -> int:
        if number < CALLS_AT_ONCE:
            met.wait()
        return number * number

    assert list(ordered_parallel_map(act, range(500))) == [number * number for number in range(500)]


def test_one_item_is_acted_on_by_the_caller() -> None:
    assert list(ordered_parallel_map(lambda _: threading.get_ident(), [1])) == [threading.get_ident()]
    assert list(ordered_parallel_map(lambda _: 1, [])) == []


def test_a_failure_ends_it() -> None:
    began: list[int] = []

    def act(number: int) -> int:
        began.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    seen = []
    with pytest.raises(ValueError, match="three"):
        seen += list(ordered_parallel_map(act, range(10_000)))
    assert len(began) <= 4 + 4 * CALLS_AT_ONCE


def test_items_are_taken_as_there_is_room_for_them() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(10_000):
            taken.append(number)
            yield number

    results = ordered_parallel_map(lambda number: number, items())
    assert next(results) == 0
    assert len(taken) <= 4 * CALLS_AT_ONCE
    # Whoever stops asking leaves no thread behind that would keep the interpreter from exiting.
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "holdfast-store")
    results.close()  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if thread.name == "holdfast-store":
            thread.join(30)
            assert not thread.is_alive()


def test_no_thread_outlives_the_calls_and_none_is_started_while_others_are_idle() -> None:
    names: set[int] = set()

    def act(number: int) -> int:
        names.add(threading.get_ident())
        return number

    results = ordered_parallel_map(act, iter(range(2)))
    assert list(results) == [0, 1]
    for thread in threading.enumerate():
        if thread.name == "holdfast-store":
            thread.join(5)
            assert not thread.is_alive()
    assert len(names) <= 2


def test_a_host_without_threads_to_spare_makes_the_calls_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert list(ordered_parallel_map(lambda number: number + 1, range(100))) == list(range(1, 101))
