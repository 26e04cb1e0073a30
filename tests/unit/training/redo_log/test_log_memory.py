"""The memory of records is bounded: training waits a moment for a seal, then goes on without the record."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.base.clock import SystemClock
from holdfast.errors import UnavailableError
from holdfast.settings import MIB
from holdfast.training.redo_log.log_memory import LogMemory


def test_memory_is_lent_again() -> None:
    memory = LogMemory(SystemClock())
    first = memory.take(40 * MIB)
    first[:3] = b"abc"
    memory.give(first)

    assert bytes(memory.take(40 * MIB)[:3]) == b"abc"


def test_training_waits_for_a_seal_and_not_for_ever() -> None:
    memory = LogMemory(SystemClock())
    held = [memory.take(32 * MIB), memory.take(32 * MIB)]
    began = time.monotonic()
    threading.Timer(0.1, memory.give, (held.pop(),)).start()
    held.append(memory.take(32 * MIB))
    assert 0.05 < memory.waited_seconds < 1

    with pytest.raises(UnavailableError, match=r"67108864 bytes of records that are not sealed, and needs 33554432"):
        memory.take(32 * MIB)
    # All waits of a minute are at most one hundredth of the minute.
    assert time.monotonic() - began < 2


def test_two_records_have_room_however_many_optimizers_step_in_each() -> None:
    memory = LogMemory(SystemClock())
    memory.record_bytes_max = 200 * MIB
    for _ in range(2):
        assert [len(memory.take(50 * MIB)) for _ in range(3)] == [50 * MIB] * 3
        assert memory.end_record(), "the next record has no room"
    assert memory.waited_seconds == 0


def test_a_record_that_never_ends_has_a_limit() -> None:
    memory = LogMemory(SystemClock())
    memory.record_bytes_max = 40 * MIB
    for _ in range(4):
        memory.take(20 * MIB)
    with pytest.raises(UnavailableError, match="83886080 bytes of records that are not sealed"):
        memory.take(20 * MIB)


def test_memory_is_short_at_half_of_the_budget() -> None:
    memory = LogMemory(SystemClock())
    memory.take(31 * MIB)
    assert not memory.end_record()
    last = memory.take(1 * MIB)
    assert memory.end_record()
    memory.give(last)
    assert not memory.end_record()


def test_nothing_is_asked_of_memory_without_gradients() -> None:
    assert len(LogMemory(SystemClock()).take(0)) == 0
