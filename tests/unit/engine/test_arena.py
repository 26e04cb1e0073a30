"""The arena: slabs come back, the budget holds, waiting is counted, nobody waits for what will not come."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.engine import arena as arenas
from holdfast.engine.arena import Arena, free_memory_bytes
from holdfast.ports.clock import SystemClock
from holdfast.settings import PAGE_BYTES


def arena(slabs: int) -> Arena:
    return Arena(PAGE_BYTES, slabs * PAGE_BYTES, SystemClock())


def test_slabs_are_apart_and_come_back() -> None:
    kept = arena(20)
    with kept.lent(20) as slabs:
        assert slabs is not None
        for number, slab in enumerate(slabs):
            slab[:] = bytes([number]) * PAGE_BYTES
        assert [slab[0] for slab in slabs] == [slab[-1] for slab in slabs] == list(range(20))
    with kept.lent(20) as slabs:
        assert slabs is not None
        assert sorted(slab[0] for slab in slabs) == list(range(20)), "memory is reused, not made anew"
    assert kept.waited_seconds == 0.0


def test_who_finds_too_few_waits_for_them_and_says_so() -> None:
    kept = arena(2)
    with kept.lent(2) as slabs:
        assert slabs is not None
        first, second = slabs.popleft(), slabs.popleft()
    timers = [threading.Timer(delay, kept.give, [slab]) for delay, slab in ((0.03, first), (0.08, second))]
    for timer in timers:
        timer.start()
    with kept.lent(2) as slabs:
        assert slabs is not None and len(slabs) == 2
    assert kept.waited_seconds >= 0.06
    for timer in timers:
        timer.join()


def test_nothing_is_lent_beside_a_save_that_is_still_being_filled() -> None:
    """It may be the one that a signal handler has interrupted, or wait for us itself."""
    kept = arena(4)
    with kept.lent(1) as outer:
        assert outer is not None
        with kept.lent(1) as inner:
            assert inner is None
    with kept.lent(4) as slabs:
        assert slabs is not None


@pytest.mark.parametrize("budget", [0, 3])
def test_what_does_not_fit_is_not_lent(budget: int) -> None:
    with arena(budget).lent(4 if budget else 0) as slabs:
        assert slabs is None


def test_without_a_budget_half_of_what_is_free_is_shared_among_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lends(count: int) -> bool:
        with Arena(PAGE_BYTES, None, SystemClock()).lent(count) as slabs:
            return slabs is not None

    monkeypatch.setattr("holdfast.engine.arena.free_memory_bytes", lambda: 100 * PAGE_BYTES)
    assert lends(50) and not lends(51)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert lends(12) and not lends(13)


def test_free_memory_is_what_the_host_has() -> None:
    (total,) = (
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    assert 0 < free_memory_bytes() <= total * 1024


def test_the_page_cache_of_a_control_group_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nfile 2\nactive_file 300000\ninactive_file 400000\n")
    monkeypatch.setattr(arenas, "_CONTROL_GROUP", tmp_path)
    assert free_memory_bytes() == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes() > 1_000_000
