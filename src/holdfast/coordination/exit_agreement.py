"""How ranks agree at which call of `maybe_save` all of them leave, however far apart they are.

Each rank has a thread that waits for a key of its own on the board, so a call in the loop costs no round trip. Whoever
is told to end sets rank 0's key; each thread hands it on to two others and says how many calls its rank has passed.
From then on a rank passes no call before it has heard the verdict: the call after the last that any rank has passed.
It waits for threads only, never for a rank in its loop, and no rank has gone by the call that is agreed.

Calls are counted, not steps: a loop may go back to an earlier step, or call every tenth step.
"""

from __future__ import annotations

import atexit
import logging
import threading
from contextlib import suppress

from holdfast.coordination.grace import usable_seconds
from holdfast.coordination.job import Job
from holdfast.errors import CheckpointError, UnavailableError

logger = logging.getLogger(__name__)

_LISTEN_SECONDS = 300.0
"""How long one wait for the alarm lasts; then the next one begins."""

_LOOK_SECONDS = 1.0
"""How often rank 0 looks whether it is still wanted while it waits for the others."""

AGREE_SECONDS_MIN = 2.0
"""How long ranks are waited for even where the grace is over: one that left alone would break the others' step. It
takes milliseconds where nobody is dead."""

_CLOSED = b"closed"


class ExitAgreement:
    """The alarm of a run, on one rank."""

    def __init__(self, job: Job, grace_seconds: float) -> None:
        self._job, self._grace_seconds = job, grace_seconds
        self._lock = threading.Lock()
        self._passed = 0
        self._is_heard = False
        self._is_raised = False
        self._is_late = False
        self._leave_at: int | None = None
        self._is_closed = False
        self.deadline: float | None = None
        """When a save must have ended, on the monotonic clock; None as long as no alarm was heard."""
        self._thread = threading.Thread(target=self._listen, name="holdfast-alarm", daemon=True)
        self._thread.start()
        # A thread that is waiting inside the board while the interpreter goes might end the process in its own way.
        atexit.register(self.close)

    def should_stop(self, told_at: float | None) -> bool:
        """Pass a call of the loop, or return that all ranks leave at this one.

        Args:
            told_at: When this rank was told to end; None if it was not.
        Raises:
            UnavailableError: Ranks cannot agree in time.
        """
        with self._lock:
            if told_at is None and not self._is_heard:
                self._passed += 1
                return False
        if told_at is not None and not self._raised(told_at):
            return False
        if self._leave_at is None:
            self._leave_at = self._verdict()
        with self._lock:
            if self._passed + 1 < self._leave_at:
                self._passed += 1
                return False
        return True

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        atexit.unregister(self.close)
        if self._job.is_inherited:
            return
        with suppress(CheckpointError, TimeoutError):
            self._say_passed(_LOOK_SECONDS)
            self._job.key_value_store.compare_set(self._wake(self._job.comm.rank), b"", _CLOSED, _LOOK_SECONDS)
        self._thread.join(2 * _LOOK_SECONDS)

    def _raised(self, told_at: float) -> bool:
        """Have every rank hear of it, once; return whether rank 0 does, which it does not where its loop is over."""
        job = self._job
        self._be_done_by(told_at)
        if self._is_raised:
            return not self._is_late
        self._is_raised = True
        elapsed = f"{job.clock.monotonic_seconds() - told_at:.3f}".encode()
        try:
            standing = job.key_value_store.compare_set(self._wake(0), b"", elapsed, self._left())
        except TimeoutError as error:
            raise UnavailableError(f"the other ranks cannot be told: {error}") from error
        self._is_late = standing == _CLOSED
        return not self._is_late

    def _verdict(self) -> int:
        key = self._job.key("alarm", "leave")
        try:
            (text,) = self._job.key_value_store.get_many([key], self._left())
        except TimeoutError as error:
            raise UnavailableError(f"ranks did not all say in time how far they are: {error}") from error
        return int(text)

    def _be_done_by(self, told_at: float) -> None:
        deadline = told_at + usable_seconds(self._grace_seconds)
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def _left(self) -> float:
        assert self.deadline is not None, "an alarm was raised or heard"
        return max(self._job.seconds_left(self.deadline), AGREE_SECONDS_MIN)

    def _listen(self) -> None:
        try:
            elapsed = self._heard()
            if elapsed is not None:
                self._answer(elapsed)
        except (CheckpointError, TimeoutError) as error:
            if not self._is_closed:
                logger.warning("a signal to end that comes to another rank may not be heard here: %s", error)

    def _heard(self) -> float | None:
        """Return for how long some rank has been told to end, once it is; None at the end of the run."""
        while not self._is_closed:
            try:
                (text,) = self._job.key_value_store.get_many([self._wake(self._job.comm.rank)], _LISTEN_SECONDS)
            except TimeoutError:
                continue
            return None if text == _CLOSED else float(text)
        return None

    def _answer(self, elapsed: float) -> None:
        """Hand the alarm on, and say how far this rank is; on rank 0, find the verdict."""
        job = self._job
        rank = job.comm.rank
        self._hand_on(rank, f"{elapsed:.3f}".encode())
        self._be_done_by(job.clock.monotonic_seconds() - elapsed)
        self._say_passed(self._left())
        if rank == 0:
            keys = [job.key("alarm", "passed", each) for each in range(job.comm.world_size)]
            leave_at = 1 + max(map(int, self._all_of(keys)))
            job.key_value_store.set(job.key("alarm", "leave"), str(leave_at).encode(), self._left())

    def _hand_on(self, rank: int, elapsed: bytes) -> None:
        """Wake the two ranks that a rank hands the alarm on to, or those after them where their loop is over."""
        for other in range(2 * rank + 1, min(2 * rank + 3, self._job.comm.world_size)):
            if self._job.key_value_store.compare_set(self._wake(other), b"", elapsed, _LOOK_SECONDS) == _CLOSED:
                self._hand_on(other, elapsed)

    def _say_passed(self, timeout_seconds: float) -> None:
        """Tell how many calls this rank has passed; it passes no other without the verdict."""
        with self._lock:
            self._is_heard = True
            passed = self._passed
        key = self._job.key("alarm", "passed", self._job.comm.rank)
        self._job.key_value_store.set(key, str(passed).encode(), timeout_seconds)

    def _all_of(self, keys: list[str]) -> list[bytes]:
        clock = self._job.clock
        end = clock.monotonic_seconds() + self._left()
        while True:
            try:
                return self._job.key_value_store.get_many(keys, _LOOK_SECONDS)
            except TimeoutError:
                if self._is_closed or clock.monotonic_seconds() >= end:
                    raise

    def _wake(self, rank: int) -> str:
        return self._job.key("alarm", "wake", rank)
