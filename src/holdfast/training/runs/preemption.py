"""Ends a run after a signal: all ranks stop at the same call of `maybe_save` and save that step if time allows.

States of a handler, all moved by the training thread:

    idle     -> watching   the first `should_stop`: from now on signals are caught
    watching -> leaving    `should_stop` returns True: the ranks agreed on this call (`ExitAgreement`)
    watching -> ended      `should_stop` raises `Preempted`: this rank received a signal, and the ranks cannot agree
    leaving  -> ended      `save_and_exit` raises `Preempted`; every later `should_stop` raises it again
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.core.engine.background import DAEMON_POOL, SLICE_SECONDS, are_done, wait_in_slices
from holdfast.core.engine.parallel_map import ordered_parallel_map
from holdfast.core.format.digest import short_digest_of
from holdfast.core.format.names import PACK_SUFFIX
from holdfast.errors import (
    PREEMPTED_ABANDONED,
    PREEMPTED_SAVED,
    CheckpointError,
    Preempted,
    UnavailableError,
    first_three,
)
from holdfast.settings import MIB, PAGE_BYTES, Preemption
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import confirmed_manifest
from holdfast.training.coordination.exit.exit_agreement import AGREE_SECONDS_MIN, ExitAgreement
from holdfast.training.coordination.exit.grace import expected_seconds, fits, usable_seconds
from holdfast.training.coordination.exit.signals import Signals
from holdfast.training.coordination.job import Job
from holdfast.training.runs.run_parts import RunParts
from holdfast.training.runs.step_request import StepState
from holdfast.training.saving.handle import SaveHandle

logger = logging.getLogger(__name__)

_SAVES_MEASURED = 5
"""Number of recent saves to compare: the slowest gives the expected duration of the next save."""

_PROBE_BYTES_MAX = 16 * MIB
"""Most bytes that the probe of the storage speed writes at once, however large the buffers are."""

_PROBE_PARTS_MAX = 4
"""Most parts that the probe writes: enough to exceed the write cache of a device."""

_PROBE_OBJECTS = 8
"""Objects that the probe sends to a store of objects, as large together as these parts: a save sends several too."""

_PROBE_SECONDS_MAX = 0.5
"""After this time the probe begins no further part: it runs within the grace period."""

_HUNG_SECONDS = 5.0
"""After this time without a written byte a write counts as hung, once its save is cancelled: the process is to end."""


@dataclass(frozen=True, slots=True)
class _StartedSave:
    """A save that began, with its start time."""

    step: int
    handle: SaveHandle
    began_seconds: float


def preemption_handler_of(job: Job, wanted: Preemption | None) -> PreemptionHandler | None:
    """Return the handler of the signals of a job; None if no signal is wanted."""
    if wanted is None:
        return None
    return PreemptionHandler(job, Signals(wanted.signals, job.clock), wanted.grace_seconds)


class PreemptionHandler:
    """The handling of a signal on one rank. Catches no signal before the first `should_stop`."""

    def __init__(self, job: Job, signals: Signals, grace_seconds: float) -> None:
        """Catch no signal yet.

        Args:
            job: The ranks.
            signals: Signals that ask this rank to end.
            grace_seconds: Time from a signal until the process is killed.
        """
        self._job, self._signals, self._grace_seconds = job, signals, grace_seconds
        self._exit_agreement: ExitAgreement | None = None
        self._unfinished_saves: list[_StartedSave] = []
        self._last: _StartedSave | None = None
        self._durations: deque[float] = deque(maxlen=_SAVES_MEASURED)
        self._end: Preempted | None = None

    @property
    def has_received_signal(self) -> bool:
        """Whether this rank received a signal to end, or has left its loop after one."""
        return self._end is not None or self._signals.received is not None

    def note_save(self, step: int, handle: SaveHandle) -> None:
        """Record a save that began."""
        self._last = _StartedSave(step, handle, self._job.clock.monotonic_seconds())
        self._unfinished_saves = [*self._unfinished(), self._last]

    def forget_last(self) -> None:
        """Forget the last save: after going back, the loop has another state at the step of that save."""
        self._last = None

    def should_stop(self, step: int) -> bool:
        """Return whether all ranks stop at this call.

        Raises:
            Preempted: This rank received a signal and cannot reach the other ranks, or it has stopped before.
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
            # The same deadline as with an agreement: a rank must not be killed while it waits for an unreachable one.
            self._job.process_deadline = self._deadline
            self._unfinished_saves = self._unfinished()
            self._await_saves()
            self._finish(step, None, f"the ranks could not agree on a step: {error}")

    def save_and_exit(
        self,
        step: int,
        location: CheckpointLocation,
        held_bytes: Callable[[], int],
        begin: Callable[[], SaveHandle],
        *,
        is_committed: bool = False,
        seal: Callable[[float], bool] | None = None,
    ) -> NoReturn:
        """Save a step if the grace period allows, and end. Every rank calls it at the same call of `maybe_save`.

        Args:
            step: The step.
            location: Where the step goes.
            held_bytes: Returns the bytes that this rank would write.
            begin: Begins the save.
            is_committed: Whether this step is committed, because it was loaded last.
            seal: Seals the redo log within some seconds; returns whether a restart would come back to this step.
        Raises:
            Preempted: Always.
        """
        # No wait for another rank may outlast the grace period.
        self._job.process_deadline = self._deadline
        # The seal first: it takes a moment, and the step is safe whatever becomes of the save.
        is_sealed = seal is not None and self._is_sealed(seal(self._wait_seconds() / 2))
        self._unfinished_saves = self._unfinished()
        handle = self._last.handle if self._last is not None and self._last.step == step else None
        refusal = None
        if not is_committed and (handle is None or handle.failure is not None):
            try:
                refusal = self._refusal(self._expected(location, held_bytes))
                handle = begin() if refusal is None else None
            except CheckpointError as error:
                refusal = f"it could not be saved: {error}"
        # `_await_saves` cancels late saves at the earlier deadline. A rank that is publishing cannot be cancelled; it
        # may use the whole grace period.
        self._job.process_deadline = self._deadline + self._grace_seconds - usable_seconds(self._grace_seconds)
        self._await_saves()
        if handle is not None and not self._is_committed(handle, location):
            refusal = f"its save failed: {handle.failure}"
        if refusal is not None and is_sealed:
            self._finish(step, location, None, f"it is in the redo log; {refusal}")
        self._finish(step, location, refusal)

    def close(self, *, hand_on: bool) -> None:
        """Restore the signal handlers, unless this rank ends after a signal: more signals may follow the first.

        Args:
            hand_on: Whether the restored handler receives a signal that no step handled.
        """
        if self._exit_agreement is not None:
            self._exit_agreement.close()
            if self._end is None:
                self._signals.give_back(hand_on=hand_on)
            else:
                # A launcher that sees the first rank end may signal the other ranks again.
                self._signals.mute(self._deadline if self._exit_agreement.deadline is not None else 0.0)

    def _refusal(self, expected: float) -> str | None:
        """Return rank 0's reason not to save the step; None if the step is saved."""
        job = self._job
        keys = job.keys_of(range(job.comm.world_size), "departure", "expected")
        key = job.key("departure", "decision")
        try:
            job.key_value_store.set(keys[job.comm.rank], f"{expected:.3f}".encode(), self._wait_seconds())
            if job.comm.rank == 0:
                seconds = [float(text) for text in job.key_value_store.get_many(keys, self._wait_seconds())]
                seconds_left = self._deadline - job.clock.monotonic_seconds()
                refusal = ""
                if seconds_left <= 0:
                    refusal = (
                        f"the ranks reached it {-seconds_left:.1f} s after the grace ended; expected a step within the "
                        f"{self._grace_seconds:g} s that begin with the signal"
                    )
                elif math.inf in seconds:
                    ranks = first_three(rank for rank, each in enumerate(seconds) if each == math.inf)
                    refusal = f"ranks [{ranks}] cannot estimate how long its save would take; their logs say why"
                elif not fits(seconds, seconds_left):
                    refusal = (
                        f"a save would take about {max(seconds):.1f} s; of the grace {seconds_left:.1f} s are left"
                    )
                job.key_value_store.set(key, refusal.encode(), self._wait_seconds())
                return refusal or None
            (decision,) = job.key_value_store.get_many([key], self._wait_seconds())
        except TimeoutError as error:
            return f"not every rank reached the step in time: {error}"
        return decision.decode() or None

    def _expected(self, location: CheckpointLocation, held_bytes: Callable[[], int]) -> float:
        """Return the seconds that a save would take on this rank; infinity if they cannot be estimated."""
        job = self._job
        now = job.clock.monotonic_seconds()
        ages = [now - save.began_seconds for save in self._unfinished_saves]
        if self._durations:
            return expected_seconds(self._durations, ages, 0, None)
        seconds_left = self._deadline - now
        if seconds_left <= 0:
            return math.inf  # The grace has ended: a probe without time would look like storage without an answer.
        # The key looks like a pack of an attempt: if the process is killed, the next sweep removes the file.
        attempt = short_digest_of(job.nonce.encode(), b"probe").hex()
        key = f"{location.folder}{attempt}/r{job.comm.rank:05d}.safetensors"
        tuning = job.settings._tuning
        in_flight = min(tuning.window_bytes * tuning.windows_in_flight, _PROBE_BYTES_MAX)
        try:
            # On another thread: storage that hangs must not hold the end of the process.
            probe = DAEMON_POOL.submit(lambda: write_bytes_per_second(location.store, key, in_flight, job.clock))
            speed = wait_in_slices(probe, seconds_left, job.clock, lambda: None)
            return expected_seconds((), ages, held_bytes(), speed)
        except (CheckpointError, TimeoutError) as error:
            logger.warning(
                "step %s: cannot estimate how long its save would take, so it is not saved: %s",
                location.step,
                str(error) or f"storage did not answer within {seconds_left:.1f} s, the rest of the grace",
            )
            return math.inf

    def _unfinished(self) -> list[_StartedSave]:
        """Return the saves that have not ended; record the durations of those that have."""
        for save in self._unfinished_saves:
            committed = save.handle.near
            if committed.done() and committed.exception() is None:
                self._durations.append(committed.result().committed_seconds)
        return [save for save in self._unfinished_saves if not save.handle.near.done()]

    def _await_saves(self) -> None:
        """Wait for unfinished saves, and cancel those that do not end in time. Never wait for a write that hangs."""
        futures = [save.handle.near for save in self._unfinished_saves]
        are_done(futures, self._job.seconds_left(self._deadline), self._job.clock)
        late = [save for save in self._unfinished_saves if not save.handle.near.done()]
        for save in late:
            if (in_flight := save.handle.in_flight) is not None:
                error = f"the save of step {save.step} was cancelled: the job received a signal to end"
                in_flight.cancel(UnavailableError(error))
        # A cancelled write ends with its next window. Neither this wait nor the exit of the process outlasts one that
        # hangs.
        progress = self._job.progress
        progress.stall_seconds_max = _HUNG_SECONDS
        while not are_done(futures, SLICE_SECONDS, self._job.clock):
            hung = progress.hung
            if hung is not None:
                for save in late:
                    error = f"the save of step {save.step} was cancelled: the job received a signal to end while {hung}"
                    save.handle.stop_waiting(UnavailableError(error))
                return

    def _is_committed(self, handle: SaveHandle, location: CheckpointLocation) -> bool:
        if not handle.may_be_committed:
            return handle.near.done() and handle.failure is None
        with suppress(CheckpointError, TimeoutError):
            # No rank knows the outcome, but storage does. A manifest of another attempt is not this save.
            look = DAEMON_POOL.submit(lambda: confirmed_manifest(location.store, location.folder))
            return wait_in_slices(look, _HUNG_SECONDS, self._job.clock, lambda: None).attempt == handle.attempt
        return False

    def _is_sealed(self, own: bool) -> bool:
        """Return whether every rank has sealed this step."""
        job = self._job
        keys, key = job.keys_of(range(job.comm.world_size), "departure", "sealed"), job.key("departure", "all-sealed")
        try:
            job.key_value_store.set(keys[job.comm.rank], str(int(own)).encode(), self._wait_seconds())
            if job.comm.rank == 0:
                sealed = job.key_value_store.get_many(keys, self._wait_seconds())
                job.key_value_store.set(key, b"0" if b"0" in sealed else b"1", self._wait_seconds())
            return job.key_value_store.get_many([key], self._wait_seconds()) == [b"1"]
        except (CheckpointError, TimeoutError):
            return False

    def _finish(
        self, step: int, location: CheckpointLocation | None, refusal: str | None, why: str = "it is saved"
    ) -> NoReturn:
        code = PREEMPTED_SAVED if refusal is None else PREEMPTED_ABANDONED
        why = why if refusal is None else refusal
        if location is None or self._job.comm.rank == 0:
            logger.warning("received a signal to end, left at step %d: %s; exit code %d", step, why, code)
        if threading.current_thread() is not threading.main_thread():
            logger.error(
                "the training loop runs on thread %s: SystemExit ends that thread and not the process, so exit code %d "
                "is lost. Call sys.exit with the code on the main thread",
                threading.current_thread().name,
                code,
            )
        # What close still does, such as a drain, leaves the process its time to exit.
        self._job.process_deadline = self._deadline
        self._end = Preempted(code, step, why)
        raise self._end

    @property
    def _deadline(self) -> float:
        assert self._exit_agreement is not None and self._exit_agreement.deadline is not None, "a signal was agreed on"
        return self._exit_agreement.deadline

    def _wait_seconds(self) -> float:
        """Return how long a wait for other ranks may last."""
        return max(self._job.seconds_left(self._deadline), AGREE_SECONDS_MIN)


def least_write_bytes(parts: RunParts, passed: StepState) -> int:
    """Return a lower bound of the bytes that this rank must write: its share of the tensors that several ranks hold.

    Every rank counts as a holder of plain tensors. Too low an estimate costs little, because a late save is cancelled
    in time. Too high an estimate would lose a step that could have been saved.
    """
    if passed.misuse is not None or (parts.base is not None and parts.job.settings.deduplicate):
        return 0  # Every byte may be unchanged.
    shards = parts.job.framework.collect(passed.state, passed.selection).shards
    world_size = parts.job.comm.world_size
    return sum(
        local.shard.bytes // (world_size if local.shard.holders is None else max(len(local.shard.holders), 1))
        for local in shards
    )


def write_bytes_per_second(store: Store, key: str, part_bytes: int, clock: Clock) -> float:
    """Return the bytes per second of writing an object part by part, or several side by side; they are deleted.

    Args:
        store: Where to write.
        key: Key of a pack; of several objects each has a number more.
        part_bytes: Bytes of one write: as much as a save has in flight. With less, storage with a high latency would
            seem slower than it is for a save. Less for a store whose objects are smaller than a few of these.
        clock: Measures the time, and gives the bytes.
    Raises:
        CheckpointError: Storage cannot be written.
    """
    keys, parts_max = [key], _PROBE_PARTS_MAX
    if store.traits.appears_whole:
        # A save sends its packs side by side there, each by one request.
        stem = key.removesuffix(PACK_SUFFIX)
        keys, parts_max = [f"{stem}-{number}{PACK_SUFFIX}" for number in range(1, _PROBE_OBJECTS + 1)], 1
        bytes_max = part_bytes * _PROBE_PARTS_MAX // _PROBE_OBJECTS
        if store.traits.object_bytes_max is not None:
            bytes_max = min(bytes_max, store.traits.object_bytes_max)
        part_bytes = max(bytes_max // PAGE_BYTES, 1) * PAGE_BYTES
    data = memoryview(mmap.mmap(-1, part_bytes))
    # Random bytes: a file system may not store zeros.
    data[:] = clock.random_bytes(part_bytes)
    start = clock.monotonic_seconds()

    def written_at(key: str) -> int | Exception:
        """Write one object; return its bytes, or why it could not be written."""
        try:
            return _write_probe(store, key, data, parts_max, lambda: clock.monotonic_seconds() - start)
        except Exception as error:  # noqa: BLE001 - raised once the other objects are written and deleted
            return error

    outcomes = list(ordered_parallel_map(written_at, keys, len(keys)))
    seconds = clock.monotonic_seconds() - start
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        if len(keys) > 1:
            with suppress(CheckpointError):
                store.delete(keys)
        raise errors[0]
    store.delete(keys)
    return sum(outcome for outcome in outcomes if isinstance(outcome, int)) / max(seconds, 1e-6)


def _write_probe(store: Store, key: str, data: memoryview, parts_max: int, elapsed_seconds: Callable[[], float]) -> int:
    """Write the same part again and again, as long as the probe may last; return the bytes of the object."""
    upload = store.upload(key, parts_max * len(data), len(data))
    written = 0
    try:
        while written < parts_max and (not written or elapsed_seconds() < _PROBE_SECONDS_MAX):
            upload.write(written * len(data), data)
            written += 1
        # Here an object store sends it, and a disk writes what it has cached.
        upload.complete(written * len(data))
    except BaseException:
        upload.abort()
        raise
    return written * len(data)
