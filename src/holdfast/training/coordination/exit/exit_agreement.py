"""The exit agreement: after a signal, all ranks stop at the same call of `maybe_save`.

A rank that receives a signal wakes rank 0; the wake-up spreads as a binary tree. Each rank reports its call count and
blocks at its next call. Rank 0 answers with max(count) + 1, the call at which all stop.

The states of a rank, and who moves it on:

    running    Calls only count. A thread waits for the wake-up key of this rank.
    signalled  The main thread received a signal, has woken rank 0, and blocks in `should_stop` for the exit call.
    woken      The thread read the wake-up key, has woken two further ranks and reported the call count.
    agreed     The exit call is known. Calls before it pass; at the exit call `should_stop` returns True.
    closed     The loop is over. The wake-up key says so, and others hand the wake-up on past this rank.

    running -> signalled             the main thread, in `should_stop`
    running, signalled -> woken      the thread of this rank
    woken -> agreed                  the main thread, once rank 0 has stored the exit call
    any -> closed                    `close()`

From the report on, a rank passes no call until it knows the exit call: so no rank has passed that call. Rank 0 waits
for threads only, never for another rank's loop, so ranks may be any number of calls apart.

Calls are counted, not steps: a loop may go back to an earlier step, or call only every tenth step.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress

from holdfast.base.interrupts import GUARD, start_thread
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.training.coordination.exit.grace import usable_seconds
from holdfast.training.coordination.job import Job

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 300.0
"""How long one wait for the wake-up key lasts; then the next one begins."""

_POLL_SECONDS = 1.0
"""How often rank 0 checks whether it was closed while it waits for the reports of the others."""

_RETRY_SECONDS, _RETRY_SECONDS_MAX = 1.0, 30.0
"""Pause after a failure of the key-value store: the first, and the longest."""

_FAILURES_MAX = 10
"""Failures counted: the pause is at its longest by then."""

AGREE_SECONDS_MIN = 2.0
"""Shortest time for the agreement, even after the grace: a rank that stops alone breaks the step of the others. With
all ranks alive the agreement takes milliseconds."""

_CLOSED = b"closed"


class ExitAgreement:
    """The exit agreement of a run, on one rank."""

    def __init__(self, job: Job, grace_seconds: float) -> None:
        self._job, self._grace_seconds = job, grace_seconds
        self._passed_calls = 0
        self._is_woken = False
        self._is_signalled = False
        self._is_rank_0_closed = False
        self._exit_call: int | None = None
        # For the thread of this agreement alone, which no save waits for.
        self._closed = threading.Event()
        self.deadline: float | None = None
        """When a save must have ended, on the monotonic clock; None before a signal or wake-up."""
        self._thread = threading.Thread(target=self._wait_and_report, name="holdfast-exit", daemon=True)
        start_thread(self._thread)
        # A thread that waits inside the key-value store while the interpreter shuts down can crash the process.
        atexit.register(self.close)

    def should_stop(self, signalled_at: float | None) -> bool:
        """Count a call of the loop; return whether all ranks stop at it.

        Args:
            signalled_at: When this rank received a signal, on the monotonic clock; None if it did not.
        Raises:
            UnavailableError: The ranks cannot agree in time.
        """
        with GUARD:
            if signalled_at is None and not self._is_woken:
                self._passed_calls += 1
                return False
        if signalled_at is not None and not self._wake_rank_0(signalled_at):
            return False
        if self._exit_call is None:
            self._exit_call = self._read_exit_call()
        with GUARD:
            if self._passed_calls + 1 < self._exit_call:
                self._passed_calls += 1
                return False
        return True

    def close(self) -> None:
        """End the thread, and mark this rank as closed for the ranks that still run."""
        self._closed.set()
        atexit.unregister(self.close)
        if self._job.is_inherited:
            return  # A forked child: the thread and the keys are its parent's.
        with suppress(CheckpointError, TimeoutError):
            self._report_passed(_POLL_SECONDS)
            self._job.key_value_store.compare_set(self._wake(self._job.comm.rank), b"", _CLOSED, _POLL_SECONDS)
        self._thread.join(2 * _POLL_SECONDS)

    def _wake_rank_0(self, signalled_at: float) -> bool:
        """Wake rank 0 on the first call; return whether it can answer, which it cannot once it is closed."""
        job = self._job
        self._set_deadline(signalled_at)
        if self._is_signalled:
            return not self._is_rank_0_closed
        self._is_signalled = True
        elapsed = f"{job.clock.monotonic_seconds() - signalled_at:.3f}".encode()
        try:
            stored = job.key_value_store.compare_set(self._wake(0), b"", elapsed, self._left())
        except TimeoutError as error:
            raise UnavailableError(f"rank 0 could not be woken for the exit: {error}") from error
        self._is_rank_0_closed = stored == _CLOSED
        return not self._is_rank_0_closed

    def _read_exit_call(self) -> int:
        key = self._job.key("alarm", "leave")
        try:
            (text,) = self._job.key_value_store.get_many([key], self._left())
        except TimeoutError as error:
            raise UnavailableError(
                f"not all ranks reported their call count in time: {error}. Expected rank 0 to name the exit call"
            ) from error
        return int(text)

    def _set_deadline(self, signalled_at: float) -> None:
        # The earliest signal counts: the grace of that rank ends first.
        deadline = signalled_at + usable_seconds(self._grace_seconds)
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def _left(self) -> float:
        assert self.deadline is not None, "set by a signal or a wake-up"
        return max(self._job.seconds_left(self.deadline), AGREE_SECONDS_MIN)

    def _wait_and_report(self) -> None:
        try:
            elapsed = self._await_wake_up()
            if elapsed is not None:
                self._report(elapsed)
        except (CheckpointError, TimeoutError) as error:
            if not self._closed.is_set():
                logger.warning(
                    "a signal to another rank may not stop this rank: %s. Send the signal to every rank", error
                )

    def _await_wake_up(self) -> float | None:
        """Return how long ago a rank received a signal, once one did; None at the end of the run."""
        failures = 0
        while not self._closed.is_set():
            try:
                (text,) = self._job.key_value_store.get_many([self._wake(self._job.comm.rank)], _WAIT_SECONDS)
            except TimeoutError:
                failures = 0
            except CheckpointError as error:
                # The network may come back. Without this thread no other rank could stop this one any more.
                if not failures:
                    logger.warning("a signal to another rank does not stop this rank now: %s. It tries again", error)
                self._closed.wait(min(_RETRY_SECONDS * 2**failures, _RETRY_SECONDS_MAX))
                failures = min(failures + 1, _FAILURES_MAX)
            else:
                return None if text == _CLOSED else float(text)
        return None

    def _report(self, elapsed: float) -> None:
        """Hand the wake-up on and report the call count of this rank; on rank 0, store the exit call."""
        job = self._job
        rank = job.comm.rank
        self._hand_on(rank, f"{elapsed:.3f}".encode())
        self._set_deadline(job.clock.monotonic_seconds() - elapsed)
        self._report_passed(self._left())
        if rank == 0:
            keys = [job.key("alarm", "passed", other) for other in range(job.comm.world_size)]
            # One past the largest count: no rank has passed that call, and none passes another before it reads this.
            exit_call = 1 + max(map(int, self._read_all(keys)))
            job.key_value_store.set(job.key("alarm", "leave"), str(exit_call).encode(), self._left())

    def _hand_on(self, rank: int, elapsed: bytes) -> None:
        """Wake the two children of a rank in the tree; past a closed child, wake its children instead."""
        for other in range(2 * rank + 1, min(2 * rank + 3, self._job.comm.world_size)):
            if self._job.key_value_store.compare_set(self._wake(other), b"", elapsed, _POLL_SECONDS) == _CLOSED:
                self._hand_on(other, elapsed)

    def _report_passed(self, timeout_seconds: float) -> None:
        """Report how many calls this rank has passed; after that it passes none before it knows the exit call."""
        # The lock of should_stop: no call can pass between reading the count and setting the flag.
        with GUARD:
            self._is_woken = True
            passed = self._passed_calls
        key = self._job.key("alarm", "passed", self._job.comm.rank)
        self._job.key_value_store.set(key, str(passed).encode(), timeout_seconds)

    def _read_all(self, keys: list[str]) -> list[bytes]:
        clock = self._job.clock
        end = clock.monotonic_seconds() + self._left()
        while True:
            try:
                return self._job.key_value_store.get_many(keys, _POLL_SECONDS)
            except TimeoutError:
                if self._closed.is_set() or clock.monotonic_seconds() >= end:
                    raise

    def _wake(self, rank: int) -> str:
        return self._job.key("alarm", "wake", rank)
