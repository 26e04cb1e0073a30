"""One call of a store, tried again until it ends well, or its deadline or that of its save has passed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from holdfast.backends.stores.wrappers.budget import RetryBudget
from holdfast.backends.stores.wrappers.concurrency import ConcurrencyLimit
from holdfast.backends.stores.wrappers.rate import SMALL_BYTES_MAX, RateLimit
from holdfast.backends.stores.wrappers.time_limits import TimeLimits
from holdfast.backends.stores.wrappers.timed_calls import TIMED_CALLS
from holdfast.base.clock import Clock
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.settings import ObjectSettings

T = TypeVar("T")

FIRST_SECONDS = 0.2
"""Bound of the first wait. Shorter than a person notices, longer than most hiccups of a server."""

LONGEST_SECONDS = 10.0
"""Bound of the later waits. Longer ones would waste much of the deadline once the store answers again."""

_CHANCE_BYTES = 4

_REQUESTS_PER_CALL = 4
"""Most requests that one call makes one after the other, as a move does. A call is abandoned after their time limits: a
store that ends its requests itself has said by then what is wrong."""


def chance(clock: Clock) -> float:
    """Return a random number in [0, 1)."""
    return float(int.from_bytes(clock.random_bytes(_CHANCE_BYTES)) / (1 << 8 * _CHANCE_BYTES))


def wait_seconds(clock: Clock, failures: int, retry_after_seconds: float | None = None) -> float:
    """Return the wait after so many failures in a row: random between nothing and a bound that doubles.

    Random over the whole range, not around its end: thousands of ranks that failed together must not return together.

    Args:
        clock: Source of chance.
        failures: Failures so far, at least one.
        retry_after_seconds: The wait that the server asked for. It is kept, and the random wait is added to it.
    """
    # The exponent is bounded, since 2.0**1024 overflows.
    bound = min(FIRST_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_SECONDS)
    return max(retry_after_seconds or 0.0, 0.0) + chance(clock) * bound


@dataclass(frozen=True, slots=True)
class Request:
    """What one call asks of the store, as far as its retries need to know."""

    name: str
    """Method of the port."""

    where: str
    """Store and key, for messages."""

    sent_bytes: int = 0
    """Bytes that it sends."""

    received_bytes_max: int = 0
    """Most bytes that it receives."""

    changes: bool = False
    """Whether it changes what is stored: then its outcome may be unknown."""

    ends_by_itself: bool = False
    """Whether the store below ends it in time. It must if the call touches memory that is used again: a call that was
    abandoned would go on to touch it."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that it moves at most."""
        return self.sent_bytes + self.received_bytes_max


@dataclass(slots=True)
class Tries:
    """The tries of one call so far, for the next one to look at."""

    failed: int = 0
    """Tries that failed."""

    may_have_taken_effect: bool = False
    """Whether one of them may have had an effect."""

    last: TemporaryError | None = None
    """Why the last one failed."""


class Retries:
    """Makes calls, and is the only one that makes them again. Any thread may call.

    A try waits for the cap, then for a free slot among the requests in flight. It has its own time limit. After a
    `TemporaryError` the next try follows a random, growing wait, as long as the deadline of the call and the budget of
    the save are not over. Any other error is final.
    """

    def __init__(
        self,
        settings: ObjectSettings,
        clock: Clock,
        limit: ConcurrencyLimit,
        budget: RetryBudget,
        rate: RateLimit | None,
    ) -> None:
        """Share what is passed.

        Args:
            settings: The deadline of a call, and the time limits of a request.
            clock: Time and chance.
            limit: Requests in flight to the server.
            budget: Of the save or load that calls.
            rate: The cap on what is sent; None: no cap.
        """
        self._settings, self._clock = settings, clock
        self._limit, self._budget, self._rate = limit, budget, rate
        self._time_limits = TimeLimits.of(settings)

    def run(self, request: Request, call: Callable[[Tries], T]) -> T:
        """Return the result of a call.

        Args:
            request: What it asks.
            call: Makes one try, knowing those before.
        Raises:
            UnavailableError: Every try failed until the deadline. If the outcome is unknown, the message says so.
            CheckpointError: A try failed for good.
        """
        tries = Tries()
        began = self._clock.monotonic_seconds()
        failed_at = began
        try:
            while True:
                with self._budget.held_back() if tries.failed else nullcontext():
                    held_back = self._wait_for_cap(request)
                outcome = self._try(request, call, tries)
                if not isinstance(outcome, TemporaryError):
                    return outcome
                # What the cap holds back is no failure of the store.
                failed_at = failed_at + held_back if tries.failed else self._clock.monotonic_seconds()
                self._note_failed(tries, outcome)
                wait = wait_seconds(self._clock, tries.failed, outcome.retry_after_seconds)
                now = self._clock.monotonic_seconds()
                if now + wait - failed_at >= self._settings.retry_seconds_per_call or self._budget.is_spent:
                    raise self._given_up(request, tries, outcome, now - began) from outcome
                self._clock.sleep(wait)
                self._budget.note_retry(outcome)
        finally:
            if tries.failed:
                self._budget.note_over()

    def _wait_for_cap(self, request: Request) -> float:
        """Wait until the cap lets the bytes of a request out; return the seconds waited."""
        return self._rate.wait(request.sent_bytes) if self._rate is not None and request.sent_bytes else 0.0

    def _try(self, request: Request, call: Callable[[Tries], T], tries: Tries) -> T | TemporaryError:
        """Make one request; return its result, or the failure that another try may mend."""
        # A copy: a try that is abandoned does not see those after it.
        before = replace(tries)
        with self._limit.slot(moves_much=request.moved_bytes > SMALL_BYTES_MAX) as slot:
            try:
                if request.ends_by_itself:
                    result = call(before)
                else:
                    seconds = _REQUESTS_PER_CALL * self._time_limits.request_seconds(request.moved_bytes)
                    where = f"{request.name} of {request.where}"
                    result = TIMED_CALLS.run(lambda: call(before), seconds, where)
            except TemporaryError as error:
                slot.has_met_pressure = error.is_throttled
                return error
            except CheckpointError:
                slot.is_answered = True
                raise
            slot.is_answered = True
            return result

    def _note_failed(self, tries: Tries, error: TemporaryError) -> None:
        self._budget.note_failed(error, is_first=not tries.failed)
        tries.failed += 1
        tries.may_have_taken_effect |= error.may_take_effect
        tries.last = error

    def _given_up(self, request: Request, tries: Tries, error: TemporaryError, seconds: float) -> UnavailableError:
        settings = self._settings
        limit = f"settings.object_store.retry_seconds_per_call is {settings.retry_seconds_per_call:g}"
        if self._budget.is_spent:
            limit = f"the retries of one save or load may take {self._budget.seconds_max:g} s, "
            limit += "settings.object_store.retry_seconds_per_save"
        outcome = ""
        if request.changes and tries.may_have_taken_effect:
            outcome = ". The outcome is unknown: one of the requests may have taken effect, or may still"
        elif request.changes:
            outcome = ". None of the requests took effect"
        asked = error.retry_after_seconds
        if asked is not None and asked >= settings.retry_seconds_per_call:
            limit += f", and the server asks to wait {asked:g} s"
        times = "once" if tries.failed == 1 else f"{tries.failed:,} times"
        return UnavailableError(
            f"{request.where}: {request.name} was tried {times} in {seconds:,.0f} s ({limit}){outcome}. Look at the "
            f"store, then retry. The last failure: {error}"
        )
