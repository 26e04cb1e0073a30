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


def test_a_record_larger_than_the_budget_has_room_for_two() -> None:
    memory = LogMemory(SystemClock())
    assert len(memory.take(80 * MIB)) == len(memory.take(80 * MIB)) == 80 * MIB


def test_nothing_is_asked_of_memory_without_gradients() -> None:
    assert len(LogMemory(SystemClock()).take(0)) == 0
