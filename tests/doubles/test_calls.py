"""The recorder of store calls: what it records, and that it passes every call on."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import MissingError
from tests.doubles.calls import RecordingStore, StoreCall, rounds, table
from tests.unit.ranks import fresh_store


def call(began: float, ended: float) -> StoreCall:
    return StoreCall("get", "key", "thread", began, ended - began)


def test_calls_are_recorded_with_their_thread_also_those_that_raise() -> None:
    store = RecordingStore(fresh_store())
    store.put("a", b"x")
    assert store.get("a", 1) == b"x"
    with pytest.raises(MissingError):
        store.size("b")
    store.delete(["a", "b"])
    calls = store.take()
    assert [(made.name, made.subject) for made in calls] == [
        ("put", "a"),
        ("get", "a"),
        ("size", "b"),
        ("delete", "a,b"),
    ]
    assert {made.thread for made in calls} == {threading.current_thread().name}
    assert table(calls).count("\n") == 3
    assert store.take() == []


def test_a_delay_lasts_before_the_call_is_passed_on() -> None:
    store = RecordingStore(fresh_store(), delay_seconds=0.01)
    store.put("a", b"x")
    (made,) = store.take()
    assert made.seconds >= 0.01


def test_a_watcher_sees_a_call_before_the_store_does() -> None:
    inner = fresh_store()
    store = RecordingStore(inner)
    seen = []
    with store.watched(lambda name, subject: seen.append((name, subject, len(list(inner.list()))))):
        store.put("a", b"x")
    store.put("b", b"x")
    assert seen == [("put", "a", 0)]


def test_rounds_count_calls_that_follow_each_other() -> None:
    assert rounds([]) == 0
    assert rounds([call(0.0, 1.0), call(0.5, 1.5), call(0.9, 2.0)]) == 1
    assert rounds([call(0.0, 1.0), call(0.5, 3.0), call(1.0, 2.0), call(2.5, 4.0)]) == 3
