"""The writer lease of a run: one process writes, renews a heartbeat, and loses the lease when the heartbeat stops.

Each lease is one numbered epoch on storage. The states of a `WriterLease`:

    free      No epoch: before the first `hold()`, and after `release()`.
    waiting   `hold()` watches the heartbeat of the newest epoch, for at most the lease time of its holder.
    claimed   The next epoch has our record and our heartbeat. The list of accepted steps is not stored yet.
    held      `hold()` returned. Saves may publish under the epoch.
    lost      A newer epoch exists. Final until `release()`: another job writes.

Who moves it on:

    free -> waiting       the caller of `hold()`; other callers wait for it, and share the epoch
    waiting -> free       `hold()`: the heartbeat was renewed, or another process created the next epoch first
    waiting -> claimed    `hold()`: the heartbeat stopped, or its holder released it or exited; the record is put if
                          absent, so exactly one process succeeds
    claimed -> held       `hold()`: the accepted steps are stored
    claimed -> free       `hold()`: any error, or `release()` meanwhile
    held -> free          `release()`, the exit hook, or the heartbeat thread after the lease object was collected
    held -> lost          another process; noticed by `require()` and by the next heartbeat

Every duration is measured by the monotonic clock of the process that waits. Wall clocks decide nothing.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.base.clock import Clock, SystemClock
from holdfast.base.interrupts import start_thread
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Epoch, Holder
from holdfast.core.format.names import EPOCH_MAX
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.stored.leases.process import is_gone, is_this_process, this_process
from holdfast.stored.repository import epochs
from holdfast.stored.repository.catalog import step_folders, touch_root
from holdfast.stored.repository.interrupted_removal import finish_removals
from holdfast.stored.repository.timeline_records import adopt_records
from holdfast.stored.repository.timelines import moved_steps
from holdfast.stored.repository.two_roots import TwoRoots

logger = logging.getLogger(__name__)

_HEARTBEATS_PER_LEASE = 3
_POLLS_PER_LEASE = 50
_RELEASE_SECONDS_MAX = 5.0
_UNREADABLE = b"cannot be read"


class WriterLease:
    """The right of this process to write to a root: taken by the first `hold()`, kept until it is released or lost."""

    def __init__(self, store: Store, clock: Clock, lease_seconds: float) -> None:
        """Take nothing yet.

        Args:
            store: The root. With a near tier `TwoRoots`: the root decides who takes an epoch, and record and list go
                to both places, so that a commit into the near tier asks that place alone.
            clock: Measures every duration.
            lease_seconds: Longest time without a heartbeat.
        """
        self._store, self._clock, self._lease_seconds = store, clock, lease_seconds
        # A near tier that is away must not stop saves into the root.
        self._arbiter = store.root if isinstance(store, TwoRoots) else store
        self.release_seconds_max = _RELEASE_SECONDS_MAX
        """How long a release waits for storage."""
        self._heartbeat: _Heartbeat | None = None
        self._claimed: _Heartbeat | None = None
        """The heartbeat of the epoch that `hold()` is taking."""
        self._releases = 0
        self._taking = threading.Lock()
        """Held while an epoch is taken. The training thread never takes it: it waits in slices for the thread that
        calls `hold`. So no signal handler that saves has interrupted a thread that holds it."""

    @property
    def epoch(self) -> int:
        """The epoch of this lease; 0 if it holds none."""
        heartbeat = self._heartbeat
        return 0 if heartbeat is None else heartbeat.epoch

    @property
    def is_lost(self) -> bool:
        """Whether this process has noticed that another one took over."""
        heartbeat = self._heartbeat
        return heartbeat is not None and heartbeat.is_lost

    def hold(self, run_id: str) -> int:
        """Return the epoch of this lease; the first call takes one.

        A call beside it, on another thread, waits for it and shares the epoch; if the first one fails, it takes one
        itself.

        Args:
            run_id: The run that the root belongs to.
        Raises:
            ConflictError: Another process, or another lease of this process, holds the newest epoch. The message
                names the holder.
            UnavailableError: Storage failed, or the lease was released meanwhile.
        """
        with self._taking:
            heartbeat = self._heartbeat
            while heartbeat is None:
                with suppress(_DroppedFirstError):
                    return self._take(run_id)
        epochs.require_newest(self._arbiter, heartbeat.epoch)
        return heartbeat.epoch

    def require(self, store: Store) -> None:
        """Check that no other process took over; call it before anything is removed.

        Args:
            store: The place that is asked: the root, or the near tier alone.
        Raises:
            ConflictError: Another process took over; the message names it.
        """
        heartbeat = self._heartbeat
        assert heartbeat is not None, "only the holder calls it"
        epochs.require_newest(store, heartbeat.epoch)

    def release(self) -> None:
        """Give the lease up, so that the next writer need not wait. Never raises, and takes no lock.

        An epoch that `hold()` is just taking on another thread is given up by that call.
        """
        self._releases += 1
        claimed = self._claimed
        if claimed is not None:
            claimed.drop()
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.end(self.release_seconds_max)

    def _require_wanted(self, releases: int) -> None:
        """Refuse to take an epoch if the lease has been released since a count."""
        if self._releases != releases:
            raise UnavailableError(
                f"{self._store.url}: the writer lease was released while it was being taken; expected an open manager. "
                "Nothing was saved. Save with an open one"
            )

    def _await_number(self) -> tuple[int, bool]:
        """Return the number of the next epoch, once the newest one is free, and whether its writer has ended."""
        former = epochs.newest_epoch(self._store)
        has_ended = former > 0 and _await_free(self._store, self._clock, former, self._lease_seconds)
        if former >= EPOCH_MAX:
            raise InvalidError(
                f"{self._store.url}: epoch {former} is the last possible number; expected a smaller one, for nobody "
                "wrote so many. Remove the record with that number, or save to another root"
            )
        return former + 1, has_ended

    def _take(self, run_id: str) -> int:
        releases = self._releases
        number, has_ended = self._await_number()
        holder = this_process(self._clock, self._lease_seconds)
        # Before the record: another manager of this process that reads the record must find this heartbeat.
        heartbeat = self._claimed = _Heartbeat(self._store, self._arbiter, number, holder)
        try:
            self._require_wanted(releases)
            if isinstance(self._store, TwoRoots):
                epochs.fill_records(self._store.root, self._store.near)
            try:
                epochs.put_epoch(self._store, Epoch(number, run_id, holder, has_ended))
            except ConflictError as conflict:
                first = epochs.read_epoch(self._store, number)
                if first is not None and is_this_process(first.holder) and not _is_living(first.holder):
                    raise _DroppedFirstError from conflict
                raise _held_error(self._store, number, "it came first") from conflict
            # The heartbeat starts before the accepted steps are stored: with many steps that takes longer than a lease.
            heartbeat.start()
            self._accept_steps(number, run_id)
            self._heartbeat = heartbeat
            # After that: a release that comes now ends the heartbeat itself.
            self._require_wanted(releases)
        except BaseException:
            self._heartbeat = None
            heartbeat.end(_RELEASE_SECONDS_MAX)
            raise
        finally:
            self._claimed = None
        # A manager that is garbage-collected without close() must not keep its root locked for the process's lifetime.
        weakref.finalize(self, heartbeat.drop).atexit = False
        # "Epoch" alone would be one of the training, to who reads its log.
        logger.info("%s: this job holds the writer lease, epoch %d of the lease", self._store.url, number)
        return number

    def _accept_steps(self, number: int, run_id: str) -> None:
        """Store which steps of former writers count. A manifest that they publish from now on does not."""
        former_fence = epochs.current_fence(self._store)
        if former_fence.epoch >= number:
            # The record of this number had gone: other jobs began and ended since this one listed the epochs.
            raise _held_error(self._store, epochs.newest_epoch(self._store), "it came first")
        # Each with its own bytes: those of a near tier name the root.
        for place in (self._store.root, self._store.near) if isinstance(self._store, TwoRoots) else (self._store,):
            touch_root(place)
        finish_removals(self._store, former_fence)
        accepted = epochs.accepted_steps(self._store, former_fence, step_folders(self._store))
        superseded = moved_steps(self._store, former_fence) if former_fence.has_timelines else None
        adopt_records(self._store, former_fence, number)
        epochs.put_accepted(self._store, number, run_id, accepted, superseded, former_fence.parents)
        try:
            # The list of the epoch before stays: readers use it if ours is damaged.
            epochs.remove_before(self._store, former_fence.epoch)
        except CheckpointError as error:
            logger.warning(
                "%s: the accepted steps of epochs before %d are not removed: %s. The next writer tries again",
                self._store.url,
                former_fence.epoch,
                error,
            )


class _DroppedFirstError(Exception):
    """A manager of this process that was closed meanwhile began the epoch: the one after it is free."""


class _Heartbeat:
    """The heartbeat of one epoch, on a thread.

    It holds no reference to its `WriterLease`: a lease that nobody refers to is collected, and its thread ends.
    """

    def __init__(self, store: Store, arbiter: Store, epoch: int, holder: Holder) -> None:
        self._store, self._arbiter, self.epoch, self._holder = store, arbiter, epoch, holder
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self.stopped = threading.Event()
        """Set it to have the thread release the epoch at once."""
        self.is_dropped = False
        self.is_lost = False
        """Whether a newer epoch exists. Set by the thread."""
        _living[holder.nonce] = self

    def start(self) -> None:
        """Renew the heartbeat from now on.

        Raises:
            UnavailableError: No thread could be started.
        """
        thread = threading.Thread(target=self._renew, name="holdfast-epoch", daemon=True)
        try:
            start_thread(thread)
        except RuntimeError as error:
            raise UnavailableError(
                f"epoch {self.epoch}: no thread could be started for the heartbeat ({error}); expected one. End some "
                "threads or raise the limit (ulimit -u), then try again"
            ) from error
        self._thread = thread

    def drop(self) -> None:
        """Have the thread release the epoch at its next heartbeat.

        A finalizer calls it, on any thread and at any point, so it takes no lock.
        """
        self.is_dropped = True

    def end(self, seconds: float) -> None:
        """Release the epoch. Never raises, and does nothing in a child process: the epoch is its parent's.

        Args:
            seconds: How long to wait for storage. After that the thread goes on in the background.
        """
        if self._process != os.getpid():
            return
        self.stopped.set()
        if self._thread is None:
            self._release()
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.drop()
            logger.warning(
                "epoch %d: not released within %.1f s, storage does not answer; the next writer may wait for one lease",
                self.epoch,
                seconds,
            )

    def _renew(self) -> None:
        count, is_failing = 0, False
        while not self.stopped.wait(self._holder.lease_seconds / _HEARTBEATS_PER_LEASE) and not self.is_dropped:
            count += 1
            try:
                epochs.require_newest(self._arbiter, self.epoch)
                epochs.put_heartbeat(self._store, self.epoch, b"%d\n" % count)
                is_failing = False
            except ConflictError as lost:
                # Nothing to release: the epoch is over, and its newer holder never reads this heartbeat again.
                logger.warning("%s", lost)
                self.is_lost = True
                _living.pop(self._holder.nonce, None)
                return
            except Exception as error:  # noqa: BLE001 - it may pass; without a heartbeat another writer takes over
                if not is_failing:
                    logger.warning("epoch %d: the heartbeat could not be written, trying again: %r", self.epoch, error)
                is_failing = True
        self._release()

    def _release(self) -> None:
        try:
            # The record may be another process's: hold() ends the heartbeat also when it came second.
            epoch = epochs.read_epoch(self._store, self.epoch)
            if epoch is not None and epoch.holder.nonce == self._holder.nonce:
                epochs.put_heartbeat(self._store, self.epoch, epochs.RELEASED)
        except Exception as error:  # noqa: BLE001 - a failed release only costs the next writer time
            logger.warning(
                "epoch %d could not be released; the next writer may wait for one lease: %r", self.epoch, error
            )
        finally:
            _living.pop(self._holder.nonce, None)


_living: dict[str, _Heartbeat] = {}
"""The heartbeats of the epochs that this process holds or is about to take, by nonce."""


@atexit.register
def _release_all() -> None:
    """Release all epochs when the process exits without closing its managers."""
    clock = SystemClock()  # An exit hook has no caller that could pass one.
    deadline = clock.monotonic_seconds() + _RELEASE_SECONDS_MAX
    # A release under way has had its time.
    heartbeats = [heartbeat for heartbeat in _living.values() if not heartbeat.stopped.is_set()]
    # Stop all first: their releases then run in parallel, within one time limit.
    for heartbeat in heartbeats:
        heartbeat.stopped.set()
    for heartbeat in heartbeats:
        heartbeat.end(max(deadline - clock.monotonic_seconds(), 0.0))


@contextmanager
def hold_writer_lease(store: Store, clock: Clock, lease_seconds: float, run_id: str) -> Iterator[WriterLease]:
    """Hold the writer lease of a run for a block, in a process that does not train.

    Raises:
        ConflictError: Another process holds it.
    """
    writer_lease = WriterLease(store, clock, lease_seconds)
    writer_lease.hold(run_id)
    try:
        yield writer_lease
    finally:
        writer_lease.release()


def _await_free(store: Store, clock: Clock, number: int, lease_seconds: float) -> bool:
    """Wait until the holder of an epoch has released it, has exited, or renewed nothing for its lease time.

    Returns:
        Whether it has ended for certain: a process that is silent may go on later.
    Args:
        store, clock: The root, and the clock to wait by.
        number: The epoch.
        lease_seconds: The lease time if the record of the epoch cannot be read.
    Raises:
        ConflictError: The holder renews its heartbeat, or is this process.
    """
    first_heartbeat = _heartbeat_of(store, number)
    if first_heartbeat == epochs.RELEASED:
        return True
    holder = None
    try:
        epoch = epochs.read_epoch(store, number)
        holder = None if epoch is None else epoch.holder
    except (CorruptError, InvalidError) as error:
        logger.warning("the record of epoch %d cannot be read, so its heartbeat is watched: %s", number, error)
    if holder is not None:
        if is_this_process(holder):
            _require_dropped(store, number, holder)
            return True
        if is_gone(holder):
            logger.info("epoch %d of the lease is taken over at once, its process has exited: %s", number, holder)
            return True
        lease_seconds = holder.lease_seconds
    logger.warning(
        "%s is held by %s: waiting up to %.1f s for its heartbeat",
        store.url,
        epochs.format_holder(store, number),
        lease_seconds,
    )
    start = clock.monotonic_seconds()
    while True:
        # The time is taken before the read: only a read that began after the lease ran out may decide. The answer to
        # an earlier one may arrive late and miss a heartbeat that was written in time.
        waited = clock.monotonic_seconds() - start
        heartbeat = _heartbeat_of(store, number)
        if heartbeat not in (first_heartbeat, epochs.RELEASED):
            raise _held_error(store, number, "its heartbeat was renewed")
        if heartbeat == epochs.RELEASED or waited >= lease_seconds:
            break
        clock.sleep(lease_seconds / _POLLS_PER_LEASE)
    logger.warning("epoch %d is taken over after %.1f s", number, waited)
    return heartbeat == epochs.RELEASED


def _require_dropped(store: Store, number: int, holder: Holder) -> None:
    """Refuse a second lease on a root within one process, unless nobody refers to the first any more."""
    if _is_living(holder):
        # A manager in a reference cycle is dropped only when the garbage collector runs.
        gc.collect()
    if _is_living(holder):
        raise _held_error(
            store,
            number,
            "another CheckpointManager of this very process. Close it first, or drop what still refers to it: a frame, "
            "an exception that is being handled, or the handle of a save that failed. A closed one may still remove "
            "steps, and a call that maintains the run, such as a collection, holds it too",
        )


def _is_living(holder: Holder) -> bool:
    heartbeat = _living.get(holder.nonce)
    return heartbeat is not None and not heartbeat.is_dropped


def _heartbeat_of(store: Store, number: int) -> bytes | None:
    """Return the last heartbeat of an epoch. One that cannot be read is a constant: it counts as never renewed."""
    try:
        return epochs.read_heartbeat(store, number)
    except (CorruptError, InvalidError) as error:
        logger.debug("the heartbeat of epoch %d cannot be read, so it is watched: %s", number, error)
        return _UNREADABLE


def _held_error(store: Store, number: int, why: str) -> ConflictError:
    return ConflictError(
        f"{store.url}: another job writes here: {epochs.format_holder(store, number)}; {why}. Expected to be the only "
        "writer of this run. Nothing was touched. Stop one of them, or save elsewhere"
    )
