"""Back-off, adaptive concurrency, the cap on the bandwidth, and calls that are abandoned."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.wrappers.concurrency import AdaptiveWindow, ConcurrencyLimit
from holdfast.backends.stores.wrappers.rate import SMALL_BYTES_MAX, RateLimit
from holdfast.backends.stores.wrappers.retries import FIRST_SECONDS, LONGEST_SECONDS, wait_seconds
from holdfast.backends.stores.wrappers.time_limits import TimeLimits
from holdfast.backends.stores.wrappers.timed_calls import TimedCalls
from holdfast.base.interrupts import GUARD
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import MissingError
from holdfast.settings import KIB, MIB, ObjectSettings
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep


class TestBackoff:
    @given(st.integers(1, 10_000), st.none() | st.floats(-10, 1000), st.integers(0, 1 << 32))
    def test_a_wait_is_within_a_bound_that_doubles(self, failures: int, asked: float | None, seed: int) -> None:
        bound = FIRST_SECONDS * 2 ** (failures - 1) if failures < 7 else LONGEST_SECONDS
        least = max(asked or 0.0, 0.0)
        assert least <= wait_seconds(ClockBySleep(seed), failures, asked) <= least + bound

    def test_ranks_that_failed_together_return_apart(self) -> None:
        waits = sorted(wait_seconds(ClockBySleep(seed), 5) for seed in range(1000))
        bound = FIRST_SECONDS * 16
        # In each tenth of the range there are some of a thousand; that one has none has a chance of 1e-44.
        assert {int(10 * wait / bound) for wait in waits} == set(range(10))


class TestAdaptiveWindow:
    @given(st.integers(1, 64), st.lists(st.tuples(st.booleans(), st.integers(0, 63)), max_size=200))
    def test_the_limit_keeps_within_its_bounds(self, most: int, ends: list[tuple[bool, int]]) -> None:
        window = AdaptiveWindow(most)
        in_flight: list[int] = []
        for is_answered, which in ends:
            in_flight += [window.begin() for _ in range(window.limit - len(in_flight))]
            count = len(in_flight)
            number = in_flight.pop(which % count)
            before = window.limit
            if is_answered:
                window.note_answered(count)
                assert before <= window.limit <= before + 1
            else:
                window.note_pressure(number)
                assert before // 2 <= window.limit <= before
            assert 1 <= window.limit <= most

    def test_one_storm_halves_once(self) -> None:
        window = AdaptiveWindow(64)
        for number in [window.begin() for _ in range(64)]:
            window.note_pressure(number)
        assert window.limit == 32
        window.note_pressure(window.begin())
        assert window.limit == 16

    def test_a_round_trip_adds_one(self) -> None:
        window = AdaptiveWindow(64)
        window.note_pressure(window.begin())
        for width in range(32, 40):
            assert window.limit == width
            for _ in range(width + 1):
                window.note_answered(width)
        for _ in range(1000):
            window.note_answered(19)
        assert window.limit == 40, "few requests in flight say nothing of many"

    @pytest.mark.parametrize("capacity", (1, 3, 10, 40))
    def test_it_finds_what_a_server_takes_at_once(self, capacity: int) -> None:
        window = AdaptiveWindow(64)
        answered = refused = 0
        for turn in range(300):
            numbers = [window.begin() for _ in range(window.limit)]
            for place, number in enumerate(numbers):
                if place < capacity:
                    window.note_answered(len(numbers))
                else:
                    window.note_pressure(number)
                if turn >= 20:
                    answered, refused = answered + (place < capacity), refused + (place >= capacity)
        assert capacity / 2 - 1 <= window.limit <= capacity + 1
        assert refused <= answered / 2
        assert answered >= 280 * capacity * 0.6


class TestConcurrencyLimit:
    def test_no_more_begin_than_it_allows(self) -> None:
        limit = ConcurrencyLimit(3)
        most = 0
        lock = threading.Lock()
        begun = threading.Semaphore(0)
        ending = threading.Semaphore(0)

        def request() -> None:
            nonlocal most
            with limit.slot(moves_much=True):
                with lock:
                    most = max(most, limit.in_flight)
                begun.release()
                assert ending.acquire(timeout=60)

        with ThreadPoolExecutor(10) as pool:
            calls = [pool.submit(request) for _ in range(10)]
            for _ in range(3):
                assert begun.acquire(timeout=60)
            # A heartbeat does not wait for packs.
            with limit.slot():
                assert limit.in_flight == 4
            ending.release(10)
            for call in calls:
                call.result(60)
        assert most == 3
        assert limit.in_flight == 0

    def test_slots_come_back_after_errors_and_narrow_on_pressure(self) -> None:
        limit = ConcurrencyLimit(8)
        with pytest.raises(MissingError), limit.slot():
            raise MissingError("no such key")
        assert (limit.in_flight, limit.limit) == (0, 8)
        with limit.slot() as slot:
            slot.has_met_pressure = True
        assert limit.limit == 4

    def test_stores_of_one_server_share_it(self) -> None:
        one = ConcurrencyLimit.shared("s3://bucket", 8)
        assert ConcurrencyLimit.shared("s3://bucket", 8) is one
        assert ConcurrencyLimit.shared("s3://other", 8) is not one

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_forked_child_begins_with_free_slots_and_locks(self) -> None:
        limit = ConcurrencyLimit.shared("s3://forked", 1)
        rate = RateLimit(1e9, ClockBySleep())
        with limit.slot(), GUARD:
            child = os.fork()
            if not child:
                with limit.slot():
                    rate.wait(1)
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class TestRateLimit:
    @given(
        st.floats(1e4, 1e9),
        st.lists(st.tuples(st.integers(1, 100), st.floats(0, 5)), min_size=1, max_size=60),
        st.integers(SMALL_BYTES_MAX + 1, 128 * MIB),
    )
    def test_it_stays_within_a_tenth_over_ten_objects(
        self, rate: float, objects: list[tuple[int, float]], largest: int
    ) -> None:
        clock = ClockBySleep()
        limit = RateLimit(rate, clock)
        sent: list[tuple[float, int]] = []
        for percent, pause in objects:
            size = max(largest * percent // 100, SMALL_BYTES_MAX + 1)
            limit.wait(size)
            sent.append((clock.seconds, size))
            clock.seconds += pause
        span = max(10.0, 10 * largest / rate)
        for first, (start, _) in enumerate(sent):
            within = sum(size for at, size in sent[first:] if at < start + span)
            assert within <= 1.1 * rate * span * (1 + 1e-9)

    def test_a_steady_stream_uses_all_of_it(self) -> None:
        clock = ClockBySleep()
        limit = RateLimit(100 * KIB, clock)
        for _ in range(11):
            limit.wait(100 * KIB)
        assert clock.seconds == pytest.approx(1010)

    def test_a_small_object_counts_and_does_not_wait(self) -> None:
        clock = ClockBySleep()
        limit = RateLimit(64 * KIB, clock)
        limit.wait(640 * KIB)
        assert limit.wait(64 * KIB) == 0
        assert limit.wait(640 * KIB) == pytest.approx(11)


class TestTimeLimits:
    def test_they_grow_with_the_bytes(self) -> None:
        limits = TimeLimits.of(ObjectSettings(silence_timeout_seconds=5, bytes_per_second_min=MIB))
        assert limits.request_seconds(0) == 5
        assert limits.request_seconds(128 * MIB) == 133


class TestTimedCalls:
    def test_a_call_that_hangs_is_abandoned_and_the_next_one_made(self) -> None:
        calls, released, ended = TimedCalls(), threading.Event(), threading.Event()

        def hang() -> None:
            released.wait(60)
            ended.set()

        with pytest.raises(TemporaryError, match=r"size of s3://b/key: no answer within 0\.01 s") as caught:
            calls.run(hang, 0.01, "size of s3://b/key")
        assert caught.value.is_throttled and caught.value.may_take_effect
        assert calls.run(lambda: 5, 60, "size") == 5
        assert not ended.is_set()
        released.set()
        assert ended.wait(60)

    def test_errors_pass_and_threads_are_used_again(self) -> None:
        calls = TimedCalls()
        names = set[str]()

        def fail() -> None:
            names.add(str(threading.get_ident()))
            raise TimeoutError("its own")

        for _ in range(20):
            with pytest.raises(TimeoutError, match="its own"):
                calls.run(fail, 60, "size")
        assert len(names) == 1
