"""A call is tried again until it ends well or its deadline has passed; what its outcome may be is said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.stores.wrappers.budget import RetryBudget
from holdfast.backends.stores.wrappers.concurrency import ConcurrencyLimit
from holdfast.backends.stores.wrappers.rate import RateLimit
from holdfast.backends.stores.wrappers.retries import LONGEST_SECONDS, Request, Retries, Tries
from holdfast.base.ports.temporary import RetryCounts, TemporaryError
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError
from holdfast.settings import MIB, ObjectSettings
from tests.unit.backends.stores.wrappers.by_hand import ClockBySleep

SETTINGS = ObjectSettings(retry_seconds_per_call=60, retry_seconds_per_save=300)
READ = Request("get", "s3://b/key", ends_by_itself=True)
WRITE = Request("put", "s3://b/key", changes=True, ends_by_itself=True)


@dataclass
class Try:
    """What the store does at one try."""

    seconds: float = 0.0
    error: CheckpointError | None = None


class Rig:
    def __init__(self, tries: Sequence[Try], settings: ObjectSettings = SETTINGS, rate: float | None = None) -> None:
        self.clock = ClockBySleep()
        self.budget = RetryBudget("save of step 7", self.clock, settings.retry_seconds_per_save)
        self.limit = ConcurrencyLimit(64)
        cap = None if rate is None else RateLimit(rate, self.clock)
        self.retries = Retries(settings, self.clock, self.limit, self.budget, cap)
        self.began: list[float] = []
        self._tries = list(tries)

    def call(self, tries: Tries) -> str:
        assert tries.failed == len(self.began)
        self.began.append(self.clock.seconds)
        each = self._tries[min(len(self.began), len(self._tries)) - 1]
        self.clock.seconds += each.seconds
        if each.error is not None:
            raise each.error
        return "done"


def busy(**options: bool | float) -> TemporaryError:
    return TemporaryError("503 Slow Down", is_throttled=True, **options)  # type: ignore[arg-type]


temporary = st.builds(
    TemporaryError,
    st.just("it failed"),
    is_throttled=st.booleans(),
    may_take_effect=st.booleans(),
    retry_after_seconds=st.none() | st.floats(0, 30),
)
final = st.sampled_from([ConflictError("exists"), InvalidError("no permission"), UnavailableError("no bucket")])


class TestRetries:
    @given(
        st.lists(st.builds(Try, st.floats(0, 200), temporary), max_size=40),
        st.builds(Try, st.floats(0, 200), st.none() | final),
        st.sampled_from([READ, WRITE]),
    )
    def test_any_order_of_failures(self, failures: list[Try], last: Try, request: Request) -> None:
        rig = Rig([*failures, last])
        error: CheckpointError | None = None
        try:
            assert rig.retries.run(request, rig.call) == "done"
        except CheckpointError as raised:
            error = raised
        made, first_failed = len(rig.began), rig.began[0] + [*failures, last][0].seconds
        # No try begins after the deadline.
        assert all(began < first_failed + 60 for began in rig.began[1:])
        if made == len(failures) + 1:
            assert error is last.error
        else:
            assert type(error) is UnavailableError and error.__cause__ is failures[made - 1].error
            failed = [each.error for each in failures[:made] if isinstance(each.error, TemporaryError)]
            known = not any(each.may_take_effect for each in failed)
            assert ("outcome is unknown" in str(error)) is (request.changes and not known)
            assert ("None of the requests took effect" in str(error)) is (request.changes and known)
            # It gives up no earlier than the longest wait before the deadline.
            wait = (failed[-1].retry_after_seconds or 0) + LONGEST_SECONDS
            assert rig.clock.seconds + wait >= first_failed + 60 or rig.budget.is_spent
        counts = rig.budget.counts
        assert counts.retries == made - 1
        assert counts.throttled == sum(
            isinstance(each.error, TemporaryError) and each.error.is_throttled for each in failures[:made]
        )
        assert counts.seconds == pytest.approx(rig.clock.seconds - first_failed if failures else 0, abs=1e-5)
        assert rig.limit.in_flight == 0

    @pytest.mark.parametrize(
        "error", (UnavailableError("no bucket"), InvalidError("no permission"), ConflictError("x"))
    )
    def test_what_lasts_is_never_tried_again(self, error: CheckpointError) -> None:
        rig = Rig([Try(error=error)])
        with pytest.raises(type(error)):
            rig.retries.run(WRITE, rig.call)
        assert len(rig.began) == 1 and not rig.clock.slept

    def test_the_message_says_what_where_how_often_and_which_setting(self) -> None:
        rig = Rig([Try(1, busy())])
        with pytest.raises(
            UnavailableError,
            match=r"s3://b/key: put was tried \d+ times in [56]\d s "
            r"\(settings.object_store.retry_seconds_per_call is 60\). None of",
        ):
            rig.retries.run(WRITE, rig.call)

    def test_no_seconds_mean_no_retry(self) -> None:
        rig = Rig([Try(0, busy())], ObjectSettings(retry_seconds_per_call=0))
        with pytest.raises(UnavailableError, match="was tried once"):
            rig.retries.run(READ, rig.call)

    def test_the_wait_that_the_server_asks_for_is_kept(self) -> None:
        rig = Rig([Try(0, busy(retry_after_seconds=7.0)), Try()])
        rig.retries.run(READ, rig.call)
        assert 7 <= rig.clock.slept[0] <= 7.2

    def test_a_wait_beyond_the_deadline_is_not_begun(self) -> None:
        rig = Rig([Try(0, busy(retry_after_seconds=600.0))])
        with pytest.raises(UnavailableError, match=r"tried once .* and the server asks to wait 600 s"):
            rig.retries.run(READ, rig.call)
        assert not rig.clock.slept

    def test_pressure_narrows_what_is_in_flight(self) -> None:
        rig = Rig([Try(0, busy()), Try(0, TemporaryError("cut")), Try(0, busy()), Try()])
        rig.retries.run(READ, rig.call)
        assert rig.limit.limit == 16

    def test_the_cap_holds_back_every_try_and_costs_no_deadline(self) -> None:
        request = Request("upload.complete", "s3://b/key", sent_bytes=100 * MIB, changes=True, ends_by_itself=True)
        rig = Rig([Try(0, TemporaryError("cut"))] * 5 + [Try()], rate=MIB)
        assert rig.retries.run(request, rig.call) == "done"
        assert [later - earlier for earlier, later in zip(rig.began, rig.began[1:], strict=False)] == [100] * 5


class TestBudget:
    def test_a_save_that_has_waited_too_long_tries_no_call_again(self) -> None:
        rig = Rig([Try(9, TemporaryError("cut")), Try(9)], ObjectSettings(retry_seconds_per_save=50))
        calls = 0
        with pytest.raises(UnavailableError, match=r"may take 50 s, settings.object_store.retry_seconds_per_save"):
            while True:
                rig.began.clear()
                rig.retries.run(READ, rig.call)
                calls += 1
        # Each waits up to 0.2 s and takes 9 s for its second try: five of them leave time for the sixth to begin.
        assert calls == 6

    def test_calls_side_by_side_count_once(self) -> None:
        clock = ClockBySleep()
        budget = RetryBudget("save", clock)
        error = TemporaryError("cut")
        for _ in range(2):
            for _ in range(3):
                budget.note_failed(error, is_first=True)
            clock.seconds += 10
            for _ in range(3):
                budget.note_over()
            clock.seconds += 100
        assert budget.counts == RetryCounts(0, 20.0, 0)

    def test_a_long_wait_is_one_line_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        rig = Rig([Try(0, busy())] * 12 + [Try()])
        rig.retries.run(READ, rig.call)
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 2, texts
        assert "save of step 7: has waited" in texts[0] and "503 Slow Down" in texts[0]
        assert "answers again" in texts[1]
        assert {record.levelno for record in caplog.records} == {logging.WARNING}

    def test_a_short_trouble_is_not_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        rig = Rig([Try(0, busy())] * 3 + [Try()])
        rig.retries.run(READ, rig.call)
        assert not caplog.records
        assert rig.budget.counts.retries == 3

    def test_threads_leave_no_trouble_behind(self) -> None:
        rig = Rig([])

        def work(number: int) -> None:
            def call(tries: Tries) -> int:
                if tries.failed < number % 4:
                    raise busy()
                return number

            assert rig.retries.run(READ, call) == number

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert rig.budget.counts.retries == rig.budget.counts.throttled == 24
        before = rig.budget.counts.seconds
        rig.clock.seconds += 100
        assert rig.budget.counts.seconds == before
