"""Copies that a device makes while the host goes on: nobody sees a window before it is whole, whatever fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.clock import SystemClock
from holdfast.base.geometry.region import Region
from holdfast.base.ports.framework import Source, Ticket
from holdfast.core.engine.arena import Arena
from holdfast.core.engine.staging import Staging
from holdfast.core.engine.writing.write import PackWriter
from holdfast.errors import UnavailableError
from holdfast.settings import PAGE_BYTES
from holdfast.training.saving.deduplication import first_page_digests
from tests.support.tuning import tuned
from tests.unit.core.engine.test_write_and_read import (
    KEY,
    SMALL,
    _written_whole,
    arena_for,
    memory,
    planned,
    require_all_back,
    shards_of,
)


class Device:
    """Makes copies one after the other, on a thread of its own, as a stream does; it can be held back, and can fail."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fails = False
        self.queued = self.made = 0
        self._queue: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def queue(self, source: Source, piece: Region, start: int, stop: int, buffer: memoryview) -> Copy:
        copy = Copy(source, piece, start, stop, buffer)
        self.queued += 1
        self._queue.put(copy)
        return copy

    def close(self) -> None:
        self.goes_on.set()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            assert self.goes_on.wait(20.0)
            if self.fails:
                copy.failure = RuntimeError("the device is lost")
            else:
                copy.source.copy_into(copy.piece, copy.start, copy.stop, copy.buffer)
                self.made += 1
            copy.over.set()


class Copy:
    """One copy, and the ticket to wait for it."""

    def __init__(self, source: Source, piece: Region, start: int, stop: int, buffer: memoryview) -> None:
        self.source, self.piece, self.start, self.stop, self.buffer = source, piece, start, stop, buffer
        self.over = threading.Event()
        self.failure: RuntimeError | None = None

    def wait(self) -> None:
        assert self.over.wait(20.0)
        if self.failure is not None:
            raise self.failure


class Several:
    """Several copies as one."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait()


class OnDevice:
    """A source of which the device makes the copies."""

    def __init__(self, source: Source, device: Device, breaks_at: int | None = None) -> None:
        self._source, self._device, self._breaks_at = source, device, breaks_at

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        if self._breaks_at is not None and start >= self._breaks_at:
            raise ValueError("lost")
        return self._device.queue(self._source, piece, start, stop, buffer)

    @classmethod
    def copy_together(cls, sources: Sequence[OnDevice], pieces: Sequence[Region], buffer: memoryview) -> Ticket:
        copies, at = [], 0
        for each, piece in zip(sources, pieces, strict=True):
            copies.append(each._device.queue(each._source, piece, 0, piece.numel, buffer[at:]))
            at += piece.numel
        return Several(copies)


class Halting(OnDevice):
    """One that halts in the midst of it, and then fails."""

    def __init__(self, source: Source, device: Device, at: int) -> None:
        super().__init__(source, device)
        self._at = at
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        if start < self._at:
            return super().copy_into(piece, start, stop, buffer)
        self.reached.set()
        assert self.goes_on.wait(20.0)
        raise ValueError("lost")


class Refusing(OnDevice):
    """One whose copies go on though waiting for them is refused, as while a graph is captured."""

    def copy_into(self, piece: Region, start: int, stop: int, buffer: memoryview) -> Ticket:
        super().copy_into(piece, start, stop, buffer)
        return Unsure()


class Unsure:
    def wait(self) -> None:
        raise RuntimeError("not permitted")


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


@pytest.fixture
def other_device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def until(reached: Callable[[], bool]) -> None:
    for _ in range(2000):
        if reached():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")


def on(device: Device, shards: Sequence[object], breaks_at: int | None = None) -> list[Source]:
    return [OnDevice(each.source, device, breaks_at) for each in shards]  # type: ignore[attr-defined, misc]


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 3 * PAGE_BYTES), min_size=1, max_size=12),
    windows=st.integers(1, 4),
    buffers=st.integers(1, 6),
)
def test_what_is_written_is_what_the_device_copied(sizes: list[int], windows: int, buffers: int) -> None:
    device = Device()
    try:
        chosen = tuned(SMALL, window_bytes=windows * PAGE_BYTES, windows_in_flight=2)
        shards = shards_of(sizes)
        pack = planned(shards)
        arena = Arena(chosen._tuning.window_bytes, buffers * chosen._tuning.window_bytes, SystemClock())
        staging = Staging(arena)
        copying = threading.Thread(target=staging.copy, args=([pack], on(device, shards)))
        copying.start()
        store = memory()
        PackWriter(store, chosen).write_staged(pack, staging)
        copying.join(20.0)
        staging.raise_failure()
        assert store.get(KEY, 1 << 30) == _written_whole(shards)
        require_all_back(arena)
    finally:
        device.close()


def test_the_host_queues_as_far_as_the_arena_reaches_and_is_through_only_when_the_device_is(device: Device) -> None:
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    staging = Staging(arena_for(pack, SMALL))
    device.goes_on.clear()
    copying = threading.Thread(target=staging.copy, args=([pack], on(device, shards)))
    copying.start()
    until(lambda: device.queued == 20)
    assert device.made == 0, "nobody waits for one copy before the next is queued"
    staging.take()  # The header, which the host has written.
    assert not staging.wait(0.1), "what is queued is still to be read"
    taken: list[bytes] = []
    writing = threading.Thread(target=lambda: taken.append(bytes(staging.take())))
    writing.start()
    writing.join(0.1)
    assert taken == [], "a window is not given out before it is whole"
    device.goes_on.set()
    assert staging.wait(20.0) and device.made == 20
    writing.join(20.0)
    copying.join(20.0)
    assert taken == [_written_whole(shards)[PAGE_BYTES : 2 * PAGE_BYTES]]


def test_a_slab_goes_back_only_when_nothing_is_copied_into_it_any_more(device: Device) -> None:
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = arena_for(pack, SMALL)
    staging = Staging(arena)
    device.goes_on.clear()
    copying = threading.Thread(target=staging.copy, args=([pack], on(device, shards)))
    copying.start()
    until(lambda: device.queued == 20)
    giving_up = threading.Thread(target=staging.give_up, args=(UnavailableError("full"),))
    giving_up.start()
    giving_up.join(0.1)
    assert len(arena._free) <= 1, "the header's alone was copied by the host"
    device.goes_on.set()
    giving_up.join(20.0)
    copying.join(20.0)
    assert device.made == 20
    require_all_back(arena)


def test_a_device_that_fails_fails_the_save_and_lets_training_through(device: Device) -> None:
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = arena_for(pack, SMALL)
    staging = Staging(arena)
    device.fails = True
    staging.copy([pack], on(device, shards))
    assert staging.wait(0.0)
    assert "the device is lost" in str(staging.unsure)
    with pytest.raises(RuntimeError, match="the device is lost"):
        PackWriter(memory(), SMALL).write_staged(pack, staging)
    assert arena.retired == 20
    require_all_back(arena)


def test_who_takes_a_window_whose_copy_fails_retires_it(device: Device) -> None:
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = arena_for(pack, SMALL)
    staging = Staging(arena)
    device.fails = True
    device.goes_on.clear()
    copying = threading.Thread(target=staging.copy, args=([pack], on(device, shards)))
    copying.start()
    until(lambda: device.queued == 20)
    arena.give(staging.take())
    failures: list[BaseException] = []

    def take() -> None:
        try:
            staging.take()
        except RuntimeError as error:
            failures.append(error)

    writing = threading.Thread(target=take)
    writing.start()
    until(lambda: staging._filled.qsize() == 19)
    device.goes_on.set()
    writing.join(20.0)
    copying.join(20.0)
    assert len(failures) == 1
    assert arena.retired == 20
    require_all_back(arena)


def test_a_window_lent_to_a_device_that_fails_is_never_lent_again(device: Device) -> None:
    shards = shards_of([3 * PAGE_BYTES])
    pack = planned(shards)
    writer = PackWriter(memory(), SMALL)
    device.fails = True
    used = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the device is lost"), writer.lent() as buffer:
            used.append(buffer)
            first_page_digests(pack.plan.items, on(device, shards), buffer)
    with pytest.raises(RuntimeError, match="the device is lost"):
        writer.digests_of(pack, on(device, shards))
    device.fails = False
    with writer.lent() as one, writer.lent() as other:
        for buffer in (one, other):
            assert len(buffer) == SMALL._tuning.window_bytes and not any(buffer is each for each in used)
            assert first_page_digests(pack.plan.items, on(device, shards), buffer) == first_page_digests(
                pack.plan.items, [each.source for each in shards], memoryview(bytearray(PAGE_BYTES))
            )


def test_a_device_that_fails_says_nothing_of_another(device: Device, other_device: Device) -> None:
    """A buffer into which the other still copies is not lent again, and nobody says the state is no longer read."""
    chosen = tuned(SMALL, window_bytes=4 * PAGE_BYTES, windows_in_flight=2)
    shards = shards_of([5000, 5000])
    pack = planned(shards)
    arena = Arena(chosen._tuning.window_bytes, 2 * chosen._tuning.window_bytes, SystemClock())
    staging = Staging(arena)
    device.fails = True
    other_device.goes_on.clear()
    sources = [*on(device, shards[:1]), *on(other_device, shards[1:])]
    copying = threading.Thread(target=staging.copy, args=([pack], sources))
    copying.start()
    until(lambda: other_device.queued == 1)
    giving_up = threading.Thread(target=staging.give_up, args=(UnavailableError("full"),))
    giving_up.start()
    giving_up.join(0.1)
    assert not staging.wait(0.0) and len(arena._free) == 1
    other_device.goes_on.set()
    giving_up.join(20.0)
    copying.join(20.0)
    assert other_device.made == 1 and staging.wait(0.0)
    assert arena.retired == 1 and len(arena._free) == 1


def test_a_wait_that_is_refused_says_nothing_of_the_copy(device: Device) -> None:
    chosen = tuned(SMALL, window_bytes=4 * PAGE_BYTES, windows_in_flight=2)
    shards = shards_of([5000, 5000])
    pack = planned(shards)
    arena = Arena(chosen._tuning.window_bytes, 2 * chosen._tuning.window_bytes, SystemClock())
    staging = Staging(arena)
    device.goes_on.clear()
    staging.copy([pack], [Refusing(each.source, device) for each in shards])
    assert staging.wait(0.0) and "not permitted" in str(staging.unsure)
    with pytest.raises(RuntimeError, match="not permitted"):
        PackWriter(memory(), chosen).write_staged(pack, staging)
    others = shards_of([7000])
    other_pack = planned(others)
    other_staging = Staging(arena)
    other_staging.copy([other_pack], [each.source for each in others])
    device.goes_on.set()
    until(lambda: device.made == 2)
    store = memory()
    PackWriter(store, chosen).write_staged(other_pack, other_staging)
    assert other_staging.unsure is None
    assert store.get(KEY, 1 << 30) == _written_whole(others)


def test_who_waits_for_memory_that_is_retired_is_told_and_not_left_waiting(device: Device) -> None:
    chosen = tuned(SMALL, window_bytes=4 * PAGE_BYTES, windows_in_flight=2)
    shards = shards_of([5000, 5000])
    pack = planned(shards)
    arena = Arena(chosen._tuning.window_bytes, chosen._tuning.window_bytes, SystemClock())
    first, second = Staging(arena), Staging(arena)
    device.goes_on.clear()
    device.fails = True
    copying = threading.Thread(target=first.copy, args=([pack], on(device, shards)))
    copying.start()
    until(lambda: device.queued == 2)
    waiting = threading.Thread(target=second.copy, args=([pack], [each.source for each in shards]))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    device.goes_on.set()
    copying.join(20.0)
    waiting.join(20.0)
    with pytest.raises(UnavailableError, match="the arena lost a buffer because waiting for a device failed"):
        second.raise_failure()
    assert not arena.holds(1), "what comes after is written without it"


def test_a_window_that_is_begun_when_the_save_is_given_up_goes_back_only_when_it_is_whole(device: Device) -> None:
    chosen = tuned(SMALL, window_bytes=4 * PAGE_BYTES, windows_in_flight=2)
    shards = shards_of([2 * PAGE_BYTES, PAGE_BYTES + 8])
    pack = planned(shards)
    arena = Arena(chosen._tuning.window_bytes, chosen._tuning.window_bytes, SystemClock())
    staging = Staging(arena)
    device.goes_on.clear()
    halting = Halting(shards[1].source, device, 0)
    copying = threading.Thread(target=staging.copy, args=([pack], [*on(device, shards[:1]), halting]))
    copying.start()
    assert halting.reached.wait(20.0)
    assert device.queued == 1
    staging.give_up(UnavailableError("full"))
    halting.goes_on.set()
    copying.join(0.1)
    assert arena._free == []
    device.goes_on.set()
    copying.join(20.0)
    assert device.made == 1
    require_all_back(arena)


def test_a_source_that_fails_is_let_go_after_the_window_that_is_being_taken(device: Device) -> None:
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = arena_for(pack, SMALL)
    staging = Staging(arena)
    device.goes_on.clear()
    halting = Halting(shards[0].source, device, PAGE_BYTES)
    copying = threading.Thread(target=staging.copy, args=([pack], [halting]))
    copying.start()
    assert halting.reached.wait(20.0)
    arena.give(staging.take())
    writing = threading.Thread(target=lambda: arena.give(staging.take()))
    writing.start()
    until(staging._filled.empty)
    halting.goes_on.set()
    assert not staging.wait(0.1), "the device still reads"
    device.goes_on.set()
    assert staging.wait(20.0) and device.made == 1
    writing.join(20.0)
    copying.join(20.0)
    require_all_back(arena)


def test_a_source_that_fails_is_let_go_after_what_it_had_queued(device: Device) -> None:
    shards = shards_of([20 * PAGE_BYTES])
    pack = planned(shards)
    arena = arena_for(pack, SMALL)
    staging = Staging(arena)
    device.goes_on.clear()
    copying = threading.Thread(target=staging.copy, args=([pack], on(device, shards, breaks_at=9 * PAGE_BYTES)))
    copying.start()
    assert not staging.wait(0.1)
    device.goes_on.set()
    assert staging.wait(20.0) and device.made == 9
    with pytest.raises(ValueError, match="lost"):
        PackWriter(memory(), SMALL).write_staged(pack, staging)
    copying.join(20.0)
    require_all_back(arena)
