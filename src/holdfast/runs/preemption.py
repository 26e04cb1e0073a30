"""What a run does when it is told to end: every rank leaves its loop at one step, saved where time allows."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.coordination.exit_agreement import AGREE_SECONDS_MIN, ExitAgreement
from holdfast.coordination.grace import expected_seconds, fits, usable_seconds
from holdfast.coordination.job import Job
from holdfast.coordination.signals import Signals
from holdfast.errors import PREEMPTED_ABANDONED, PREEMPTED_SAVED, CheckpointError, Preempted, UnavailableError
from holdfast.format.digest import short_digest_of
from holdfast.ports.framework import LocalShard
from holdfast.repository.catalog import confirmed_manifest
from holdfast.runs.write_probe import write_bytes_per_second
from holdfast.saving.handle import SaveHandle
from holdfast.settings import MIB

logger = logging.getLogger(__name__)

_SAVES_MEASURED = 5
"""The slowest of so many saves is what the next is expected to take."""

_PROBE_BYTES_MAX = 16 * MIB
"""Written at once to see how fast storage is: little beside what is free, however large windows are chosen."""


@dataclass(frozen=True, slots=True)
class _StartedSave:
    step: int
    handle: SaveHandle
    began_seconds: float


class PreemptionHandler:
    """The end of a run that is told to end, on one rank. Nothing happens before the first call of `should_stop`."""

    def __init__(self, job: Job, signals: Signals, grace_seconds: float) -> None:
        """Do nothing yet.

        Args:
            job: The ranks.
            signals: What tells this one to end.
            grace_seconds: From a signal until the process is killed.
        """
        self._job, self._signals, self._grace_seconds = job, signals, grace_seconds
        self._exit_agreement: ExitAgreement | None = None
        self._unfinished_saves: list[_StartedSave] = []
        self._last: _StartedSave | None = None
        self._durations: deque[float] = deque(maxlen=_SAVES_MEASURED)
        self._end: Preempted | None = None

    def note_save(self, step: int, handle: SaveHandle) -> None:
        """Take note of a save that began."""
        self._last = _StartedSave(step, handle, self._job.clock.monotonic_seconds())
        self._unfinished_saves = [*self._unfinished(), self._last]

    def forget_last(self) -> None:
        """Forget the last save: after going back, the loop has another state at the step of that save."""
        self._last = None

    def should_stop(self, step: int) -> bool:
        """Return whether all ranks leave at this call of the loop.

        Raises:
            Preempted: This rank was told to end, and the others cannot be heard; or it has left before.
        """
        if self._end is not None:
            raise self._end
        if self._exit_agreement is None:
            self._exit_agreement = ExitAgreement(self._job, self._grace_seconds)
            self._signals.take()
        received = self._signals.received
        try:
            return self._exit_agreement.should_stop(None if received is None else received[1])
        except CheckpointError as error:
            # As bounded as where they agree: nobody must be killed while it waits for who cannot be heard.
            self._job.process_deadline = self._deadline
            self._unfinished_saves = self._unfinished()
            self._await_saves()
            self._finish(step, None, f"ranks could not agree on a step: {error}")

    def save_and_exit(
        self,
        step: int,
        location: CheckpointLocation,
        held_bytes: Callable[[], int],
        begin: Callable[[], SaveHandle],
        *,
        is_there: bool = False,
    ) -> NoReturn:
        """Save a step if that fits what is left of the grace, and end; on every rank at the same call.

        Args:
            step: The step.
            place: Where it goes.
            held_bytes: Returns what this rank would write of it.
            begin: Begins its save.
            is_there: Whether that very step is committed, and was loaded last.
        Raises:
            Preempted: Always.
        """
        # No rank is waited for longer.
        self._job.process_deadline = self._deadline
        self._unfinished_saves = self._unfinished()
        own = self._last.handle if self._last is not None and self._last.step == step else None
        refusal = None
        if not is_there and (own is None or own.failure is not None):
            try:
                refusal = self._refusal(self._expected(location, held_bytes))
                own = begin() if refusal is None else None
            except CheckpointError as error:
                refusal = f"it could not be saved: {error}"
        # Saves under way are abandoned before that, unless somebody is publishing: he has all of the grace.
        self._job.process_deadline = self._deadline + self._grace_seconds - usable_seconds(self._grace_seconds)
        self._await_saves()
        if own is not None and not self._is_committed(own, location):
            refusal = f"its save failed: {own.failure}"
        self._finish(step, location, refusal)

    def close(self, *, hand_on: bool) -> None:
        """Give signals back, unless the process is on its way out: others may follow the one that was answered.

        Args:
            hand_on: Whether a signal that no step answered does now what it would have done without us.
        """
        if self._exit_agreement is not None:
            self._exit_agreement.close()
            if self._end is None:
                self._signals.give_back(hand_on=hand_on)
            else:
                # Whoever sees the first rank end may tell the others once more.
                self._signals.mute(self._deadline if self._exit_agreement.deadline is not None else 0.0)

    def _refusal(self, expected: float) -> str | None:
        """Return why the step is not to be saved, as rank 0 tells everybody; None if it is."""
        job = self._job
        keys = [self._key("expected", rank) for rank in range(job.comm.world_size)]
        key = self._key("decision")
        try:
            job.key_value_store.set(keys[job.comm.rank], f"{expected:.3f}".encode(), self._patience())
            if job.comm.rank == 0:
                seconds = [float(each) for each in job.key_value_store.get_many(keys, self._patience())]
                left = self._deadline - job.clock.monotonic_seconds()
                refusal = ""
                if not fits(seconds, left):
                    refusal = (
                        f"a save would take about {max(seconds):.1f} s; of the grace {max(left, 0.0):.1f} s are left"
                    )
                job.key_value_store.set(key, refusal.encode(), self._patience())
                return refusal or None
            (told_refusal,) = job.key_value_store.get_many([key], self._patience())
        except TimeoutError as error:
            return f"ranks did not all come to the step in time: {error}"
        return told_refusal.decode() or None

    def _expected(self, location: CheckpointLocation, held_bytes: Callable[[], int]) -> float:
        job = self._job
        now = job.clock.monotonic_seconds()
        ages = [now - each.began_seconds for each in self._unfinished_saves]
        if self._durations:
            return expected_seconds(self._durations, ages, 0, None)
        # Named as the pack of an attempt: what is left of it where the process is killed is removed as one.
        attempt = short_digest_of(job.nonce.encode(), b"probe").hex()
        key = f"{location.folder}{attempt}/r{job.comm.rank:05d}.safetensors"
        try:
            in_flight = min(job.settings.window_bytes * job.settings.windows_in_flight, _PROBE_BYTES_MAX)
            speed = write_bytes_per_second(location.store, key, in_flight, job.clock)
            return expected_seconds((), ages, held_bytes(), speed)
        except CheckpointError as error:
            logger.warning("step %s: nobody can say how long its save would take: %s", location.step, error)
            return math.inf

    def _unfinished(self) -> list[_StartedSave]:
        """Return the saves under way, after measuring those that are not any more."""
        for each in self._unfinished_saves:
            committed = each.handle.committed
            if committed.done() and committed.exception() is None:
                self._durations.append(committed.result().committed_seconds)
        return [each for each in self._unfinished_saves if not each.handle.committed.done()]

    def _await_saves(self) -> None:
        """Wait for saves under way, and abandon those that do not end in time."""
        late = [
            each
            for each in self._unfinished_saves
            if not _ends_within(each.handle, self._job.seconds_left(self._deadline))
        ]
        for each in late:
            each.handle.abandon(
                UnavailableError(f"the save of step {each.step} was abandoned: the job was told to end")
            )
        for each in late:
            each.handle.committed.exception()

    def _is_committed(self, handle: SaveHandle, location: CheckpointLocation) -> bool:
        committed = handle.committed
        if committed.done() and committed.exception() is None:
            return True
        if not isinstance(handle.failure, UnavailableError):
            return False
        try:
            # Where nobody could tell, storage can: there was none when this save began.
            confirmed_manifest(location.store, location.folder)
        except CheckpointError:
            return False
        return True

    def _finish(self, step: int, location: CheckpointLocation | None, refusal: str | None) -> NoReturn:
        code = PREEMPTED_SAVED if refusal is None else PREEMPTED_ABANDONED
        why = "it is saved" if refusal is None else refusal
        if location is None or self._job.comm.rank == 0:
            logger.warning("told to end, and left at step %d: %s; exit code %d", step, why, code)
        if threading.current_thread() is not threading.main_thread():
            logger.error(
                "the loop runs on thread %s, which ends by this, and not the process: exit code %d is lost unless the "
                "main thread leaves with it (sys.exit)",
                threading.current_thread().name,
                code,
            )
        self._end = Preempted(code, step, why)
        raise self._end

    @property
    def _deadline(self) -> float:
        assert self._exit_agreement is not None and self._exit_agreement.deadline is not None, "the alarm was heard"
        return self._exit_agreement.deadline

    def _patience(self) -> float:
        return max(self._job.seconds_left(self._deadline), AGREE_SECONDS_MIN)

    def _key(self, *parts: object) -> str:
        return self._job.key("departure", *parts)


def _ends_within(handle: SaveHandle, seconds: float) -> bool:
    try:
        handle.committed.exception(seconds)
    except TimeoutError:
        return False
    return True


def estimated_write_bytes(shards: Sequence[LocalShard], world_size: int) -> int:
    """Return about how much this rank writes of a state: its share of what it holds and others hold, too.

    Of plain tensors every rank is taken for a holder. What falls short is abandoned in time; what was never tried
    because it was thought to be more is lost.
    """
    return sum(
        sum(piece.numel for piece in each.shard.pieces)
        * each.shard.tensor.itemsize
        // (world_size if each.shard.holders is None else max(len(each.shard.holders), 1))
        for each in shards
    )
