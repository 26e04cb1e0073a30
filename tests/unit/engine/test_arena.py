"""The arena: slabs come back, the budget holds, waiting is counted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.engine.arena import Arena, free_memory_bytes
from holdfast.ports.clock import SystemClock
from holdfast.settings import PAGE_BYTES


def arena(slabs: int) -> Arena:
    made = Arena(PAGE_BYTES, slabs * PAGE_BYTES, SystemClock())
    assert made.holds(slabs) and not made.holds(slabs + 1)
    return made


def test_slabs_are_apart_and_come_back() -> None:
    kept = arena(20)
    slabs = [kept.take() for _ in range(20)]
    for number, slab in enumerate(slabs):
        slab[:] = bytes([number]) * PAGE_BYTES
    assert [slab[0] for slab in slabs] == [slab[-1] for slab in slabs] == list(range(20))
    for slab in slabs:
        kept.give(slab)
    again = [kept.take() for _ in range(20)]
    assert sorted(slab[0] for slab in again) == list(range(20)), "memory is reused, not made anew"
    assert kept.waited_seconds == 0.0


def test_who_finds_none_waits_for_one_and_says_so() -> None:
    kept = arena(1)
    slab = kept.take()
    timer = threading.Timer(0.05, kept.give, [slab])
    timer.start()
    assert kept.take() is slab
    assert kept.waited_seconds >= 0.04
    timer.join()


def test_without_a_budget_half_of_what_is_free_is_shared_among_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def holds(mib: int) -> bool:
        return Arena(1 << 20, None, SystemClock()).holds(mib)

    monkeypatch.setattr("holdfast.engine.arena.free_memory_bytes", lambda: 100 << 20)
    assert holds(50) and not holds(51)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert holds(12) and not holds(13)


def test_free_memory_is_what_the_host_has() -> None:
    (total,) = (
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    assert 0 < free_memory_bytes() <= total * 1024
