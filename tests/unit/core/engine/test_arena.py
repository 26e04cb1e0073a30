"""The arena: buffers come back, the budget holds, waiting is counted, nobody waits for what will not come."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from collections.abc import Callable

import pytest

from holdfast.base.clock import SystemClock
from holdfast.core.engine.arena import _BLOCK_BUFFERS_MAX, Arena
from holdfast.core.engine.buffers import across, address_of
from holdfast.core.engine.memory_limits import MemoryShare
from holdfast.errors import UnavailableError
from holdfast.settings import PAGE_BYTES


def arena(buffers: int) -> Arena:
    return Arena(PAGE_BYTES, buffers * PAGE_BYTES, SystemClock())


def taken(kept: Arena, count: int) -> list[memoryview]:
    buffers = [kept.take(lambda: False) for _ in range(count)]
    assert all(buffer is not None for buffer in buffers)
    return [buffer for buffer in buffers if buffer is not None]


def test_slabs_are_apart_and_come_back() -> None:
    kept = arena(20)
    for number, buffer in enumerate(buffers := taken(kept, 20)):
        buffer[:] = bytes([number]) * PAGE_BYTES
    assert [buffer[0] for buffer in buffers] == [buffer[-1] for buffer in buffers] == list(range(20))
    for buffer in buffers:
        kept.give(buffer)
    assert sorted(buffer[0] for buffer in taken(kept, 20)) == list(range(20)), "memory is reused, not made anew"
    assert kept.waited_seconds == 0.0


def test_the_first_free_buffer_is_taken_so_that_those_taken_in_turn_follow_each_other() -> None:
    kept = arena(10)
    buffers = taken(kept, 10)
    for number in (7, 2, 9, 4, 3):
        kept.give(buffers[number])
    again = taken(kept, 3)
    assert [any(buffer is buffers[number] for number in (2, 3, 4)) for buffer in again] == [True] * 3
    whole = across(again)
    assert whole is not None and whole.nbytes == 3 * PAGE_BYTES


def test_a_second_save_writes_no_memory_that_the_first_left_untouched() -> None:
    """Blocks are often placed one below the other, and what a save leaves of the last one stays unused."""
    kept = arena(5 * _BLOCK_BUFFERS_MAX)
    for rest in (1, _BLOCK_BUFFERS_MAX + 3, 3 * _BLOCK_BUFFERS_MAX + 5):
        first = taken(kept, rest)
        for buffer in first:
            kept.give(buffer)
        again = taken(kept, rest)
        assert [address_of(buffer) for buffer in again] == [address_of(buffer) for buffer in first]
        for buffer in reversed(again):
            kept.give(buffer)


def test_who_finds_none_waits_for_one_and_says_so() -> None:
    kept = arena(2)
    buffers = taken(kept, 2)
    timer = threading.Timer(0.08, kept.give, [buffers[1]])
    timer.start()
    assert taken(kept, 1)[0].obj is buffers[1].obj
    assert kept.waited_seconds >= 0.06
    timer.join()


def test_who_gives_up_is_woken_and_gets_nothing() -> None:
    kept = arena(1)
    (buffer,) = taken(kept, 1)
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
    kept.give(buffer)
    assert kept.take(given_up.is_set) is not None, "what is there is given to anybody"


@pytest.mark.parametrize(("budget", "count", "holds"), [(3, 3, True), (3, 4, False), (0, 0, False), (1, 0, True)])
def test_what_the_budget_holds(budget: int, count: int, holds: bool) -> None:
    assert arena(budget).holds(count) is holds


def test_without_a_budget_half_of_this_ranks_share_of_the_free_memory_is_used() -> None:
    class HundredPages(MemoryShare):
        def free_bytes(self) -> int:
            return 100 * PAGE_BYTES

    shared = Arena(PAGE_BYTES, None, SystemClock(), HundredPages())
    assert shared.holds(50) and not shared.holds(51)


def test_who_asks_for_little_makes_it_grow_little_and_still_gets_what_is_there() -> None:
    kept = arena(40)

    def take() -> memoryview | None:
        return kept.take(lambda: True, 2 * PAGE_BYTES)

    few = [take() for _ in range(3)]
    assert [buffer is None for buffer in few] == [False, False, True]
    more = taken(kept, 5)
    for buffer in more:
        kept.give(buffer)
    assert take() is not None
    assert arena(40).take(lambda: True, 0) is not None, "one buffer at least"


class Pins:
    """Page-locks with the kernel itself (mlock), as a device's runtime would; can run out."""

    def __init__(self, count_max: int = 100) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if 0 <= limit < 1 << 20:
            pytest.skip(f"RLIMIT_MEMLOCK is {limit}: nothing to pin with")
        self.count_max = count_max
        self.pinned: dict[int, int] = {}
        self.tried = 0

    def __call__(self, memory: memoryview) -> Callable[[], None]:
        self.tried += 1
        address, length = ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes
        if len(self.pinned) >= self.count_max:
            raise UnavailableError("no more")
        assert _LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length)) == 0
        self.pinned[address] = length

        def unpin() -> None:
            assert _LIBC.munlock(ctypes.c_void_p(address), ctypes.c_size_t(length)) == 0, "not mapped any more"
            del self.pinned[address]

        return unpin


_LIBC = ctypes.CDLL(None, use_errno=True)


def test_what_is_there_and_what_comes_is_pinned_until_the_memory_is_let_go() -> None:
    kept, pins = arena(160), Pins()
    buffers = taken(kept, 64)
    assert pins.pinned == {}
    kept.pin(pins)
    assert sum(pins.pinned.values()) == 64 * PAGE_BYTES
    kept.pin(Pins(0))
    buffers += taken(kept, 96)
    assert sum(pins.pinned.values()) == 160 * PAGE_BYTES
    kept.give(buffers.pop())
    kept.close()
    assert len(pins.pinned) == 3, "somebody may still copy into the rest"
    for buffer in buffers:
        kept.give(buffer)
    kept.close()
    assert pins.pinned == {}
    taken(kept, 1)
    assert len(pins.pinned) == 1, "who goes on with it has it pinned again"


def test_an_arena_that_nobody_closes_unpins_before_its_memory_is_freed() -> None:
    kept, pins = arena(80), Pins()
    kept.pin(pins)
    for buffer in taken(kept, 80):
        kept.give(buffer)
    del buffer
    assert len(pins.pinned) == 2
    del kept
    gc.collect()
    assert pins.pinned == {}


def test_who_cannot_pin_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    kept, pins = arena(256), Pins(count_max=1)
    kept.pin(pins)
    taken(kept, 256)
    assert (len(pins.pinned), pins.tried) == (1, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not pinned, so copies take longer: no more" in caplog.text


def test_whatever_pinning_fails_with_the_memory_is_lent() -> None:
    def pin(memory: memoryview) -> Callable[[], None]:
        raise RuntimeError("device-side assert")

    kept = arena(160)
    kept.pin(pin)
    taken(kept, 160)
    assert kept.take(lambda: True) is None, "all of it is counted"


def test_memory_that_is_retired_is_neither_lent_again_nor_unpinned() -> None:
    kept, pins = arena(160), Pins()
    kept.pin(pins)
    buffers = taken(kept, 160)
    kept.quarantine_buffer(buffers[0])
    assert kept.retired == 1 and kept.holds(159) and not kept.holds(160)
    for buffer in buffers[1:]:
        kept.give(buffer)
    lent = taken(kept, 159)
    assert kept.take(lambda: True) is None
    lost = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
    assert lost not in [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in lent]
    for buffer in lent:
        kept.give(buffer)
    del buffers, buffer, lent
    kept.close()
    assert list(pins.pinned) == [lost], "the device may still copy into its block"
    assert len(taken(kept, 159)) == 159
    del kept
    gc.collect()
    assert list(pins.pinned) == [lost]
    ctypes.memset(lost, 1, PAGE_BYTES)


def test_who_waits_while_memory_is_retired_asks_again_whether_to_give_up() -> None:
    kept = arena(1)
    (buffer,) = taken(kept, 1)
    got: list[memoryview | None] = []
    waiting = threading.Thread(target=lambda: got.append(kept.take(lambda: kept.retired == 1)))
    waiting.start()
    waiting.join(0.1)
    kept.quarantine_buffer(buffer)
    waiting.join(20.0)
    assert got == [None]
    assert kept.take(lambda: False) is None, "with nothing left nobody waits"


def test_a_forked_child_leaves_the_pins_to_its_parent() -> None:
    kept, pins = arena(4), Pins()
    kept.pin(pins)
    (buffer,) = taken(kept, 1)
    buffer[:] = b"x" * PAGE_BYTES
    child = os.fork()
    if child == 0:
        try:
            kept.give(buffer)
            kept.close()
            assert len(pins.pinned) == 1 and not any(buffer)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(buffer) == b"x" * PAGE_BYTES and len(pins.pinned) == 1
