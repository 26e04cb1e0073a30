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


def taken(kept: Arena, count: int) -> list[memoryview]:
    slabs = [kept.take(lambda: False) for _ in range(count)]
    assert all(slab is not None for slab in slabs)
    return [slab for slab in slabs if slab is not None]


def test_slabs_are_apart_and_come_back() -> None:
    kept = arena(20)
    for number, slab in enumerate(slabs := taken(kept, 20)):
        slab[:] = bytes([number]) * PAGE_BYTES
    assert [slab[0] for slab in slabs] == [slab[-1] for slab in slabs] == list(range(20))
    for slab in slabs:
        kept.give(slab)
    assert sorted(slab[0] for slab in taken(kept, 20)) == list(range(20)), "memory is reused, not made anew"
    assert kept.waited_seconds == 0.0


def test_who_finds_none_waits_for_one_and_says_so() -> None:
    kept = arena(2)
    slabs = taken(kept, 2)
    timer = threading.Timer(0.08, kept.give, [slabs[1]])
    timer.start()
    assert taken(kept, 1)[0].obj is slabs[1].obj
    assert kept.waited_seconds >= 0.06
    timer.join()


def test_who_gives_up_is_woken_and_gets_nothing() -> None:
    kept = arena(1)
    (slab,) = taken(kept, 1)
    given_up = threading.Event()
    got: list[memoryview | None] = []
    waiting = threading.Thread(target=lambda: got.append(kept.take(given_up.is_set)))
    waiting.start()
    kept.wake()
    waiting.join(0.1)
    assert waiting.is_alive(), "woken, but not given up"
    given_up.set()
    kept.wake()
    waiting.join(20.0)
    assert got == [None]
    kept.give(slab)
    assert kept.take(given_up.is_set) is not None, "what is there is given to anybody"


@pytest.mark.parametrize(("budget", "count", "holds"), [(3, 3, True), (3, 4, False), (0, 0, False), (1, 0, True)])
def test_what_the_budget_holds(budget: int, count: int, holds: bool) -> None:
    assert arena(budget).holds(count) is holds


def test_without_a_budget_half_of_what_is_free_is_shared_among_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def holds(count: int, *, lazy: bool = False) -> bool:
        return Arena(PAGE_BYTES, None, SystemClock(), lazy=lazy).holds(count)

    monkeypatch.setattr("holdfast.engine.arena.free_memory_bytes", lambda: 100 * PAGE_BYTES)
    assert holds(50) and not holds(51)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert holds(12) and not holds(13)
    monkeypatch.setattr("holdfast.engine.arena.free_memory_bytes", lambda: 1 << 50)
    few = (512 << 20) // PAGE_BYTES
    assert holds(few + 1) and holds(few, lazy=True) and not holds(few + 1, lazy=True)


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
