"""Holding the epoch of a run: one process may write, says so again and again, and is replaced when it falls silent."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.clock import Clock, SystemClock
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, UnavailableError
from holdfast.format.names import EPOCH_MAX
from holdfast.leases.process import is_gone, is_this_process, this_process
from holdfast.ports.store import Store
from holdfast.repository.catalog import step_folders
from holdfast.repository.epochs import (
    RELEASED,
    accepted_steps,
    current_fence,
    format_holder,
    newest_epoch,
    put_accepted,
    put_epoch,
    put_heartbeat,
    read_epoch,
    read_heartbeat,
    remove_before,
    require_newest,
)
from holdfast.types.epoch import Epoch, Fence, Holder

logger = logging.getLogger(__name__)

_BEATS_PER_LEASE = 3
_LOOKS_PER_LEASE = 50
_RELEASE_SECONDS_MAX = 5.0
_UNREADABLE = b"cannot be read"


class WriterLease:
    """The right of this process to write to a root, taken at the first need and kept until it is released or lost.

    What it rests on is on storage; the wall clock decides nothing. Lost once, it stays lost: another job writes.
    """

    def __init__(self, store: Store, clock: Clock, lease_seconds: float) -> None:
        self._store, self._clock, self._lease_seconds = store, clock, lease_seconds
        self._pulse: _Heartbeat | None = None
        self._fence = Fence()

    @property
    def epoch(self) -> int:
        """The epoch that is held; 0 if none."""
        return 0 if self._pulse is None else self._pulse.epoch

    @property
    def fence(self) -> Fence:
        """What was accepted of former writers when it was taken."""
        return self._fence

    def hold(self, run_id: str) -> int:
        """Return the epoch that this process holds, after taking one if it holds none yet.

        Args:
            run_id: The run that the root belongs to.
        Raises:
            ConflictError: Another process, or another manager of this one, holds it; the message names it.
            UnavailableError: Storage failed.
        """
        if self._pulse is None:
            self._take(run_id)
        else:
            self.require()
        return self.epoch

    def require(self) -> None:
        """Refuse to go on once another process has taken over; to be asked before anything is removed.

        Raises:
            ConflictError: It has; the message names it.
        """
        assert self._pulse is not None, "asked by a holder"
        require_newest(self._store, self._pulse.epoch)

    def release(self) -> None:
        """Let the next one in at once. Never raises."""
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.end(_RELEASE_SECONDS_MAX)

    def _take(self, run_id: str) -> None:
        former = newest_epoch(self._store)
        if former:
            _await_the_end(self._store, self._clock, former, self._lease_seconds)
        if former >= EPOCH_MAX:
            raise InvalidError(f"{self._store.url}: epoch {former} is the last there can be; nobody wrote so many")
        holder, number = this_process(self._clock, self._lease_seconds), former + 1
        # Before the record: another manager of this process that meets it must find whose it is.
        pulse = _Heartbeat(self._store, number, holder)
        try:
            try:
                put_epoch(self._store, Epoch(number, run_id, holder))
            except ConflictError as conflict:
                raise _taken(self._store, number, "it came first") from conflict
            pulse.start()
            self._settle(number, run_id)
        except BaseException:
            pulse.end(_RELEASE_SECONDS_MAX)
            raise
        self._pulse = pulse
        weakref.finalize(self, pulse.drop).atexit = False
        logger.info("%s: writing under epoch %d", self._store.url, number)

    def _settle(self, number: int, run_id: str) -> None:
        """Say what counts of what former writers left: from here on, nothing that they still add."""
        before = current_fence(self._store)
        accepted = accepted_steps(self._store, before, step_folders(self._store))
        put_accepted(self._store, number, run_id, accepted)
        self._fence = Fence(number, accepted)
        try:
            # That of the one before stays, for the case that ours is damaged.
            remove_before(self._store, before.epoch)
        except CheckpointError as error:
            logger.warning("what epochs before %d accepted stays for now: %s", before.epoch, error)


class _Heartbeat:
    """The signs of life of one epoch. Knows nothing of its tenure, so that one that is dropped can end."""

    def __init__(self, store: Store, epoch: int, holder: Holder) -> None:
        self._store, self.epoch, self._holder = store, epoch, holder
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self.is_dropped = False
        _living[holder.nonce] = self

    def start(self) -> None:
        """Give signs of life from now on.

        Raises:
            UnavailableError: There can be no thread for it.
        """
        thread = threading.Thread(target=self._beat, name="holdfast-epoch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise UnavailableError(
                f"epoch {self.epoch}: no thread could be started that gives signs of life ({error}). End some threads "
                "or raise the limit (ulimit -u), then try again"
            ) from error
        self._thread = thread

    def drop(self) -> None:
        """Take note that nobody can write under it any more; called wherever garbage is collected, so takes no lock."""
        self.is_dropped = True

    def stop(self) -> None:
        """Have the thread let the next one in, and wait for nothing."""
        self._stopped.set()

    def end(self, seconds: float) -> None:
        """Let the next one in. Never raises, and does nothing in a process that was forked since.

        Args:
            seconds: How long to wait for storage; after that it goes on in the background while the process lives.
        """
        if self._process != os.getpid():
            return
        self.stop()
        if self._thread is None:
            self._release()
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.drop()
            logger.warning(
                "epoch %d: storage did not answer for %.1f s, the next writer may have to wait", self.epoch, seconds
            )

    def _beat(self) -> None:
        count, is_failing = 0, False
        while not self._stopped.wait(self._holder.lease_seconds / _BEATS_PER_LEASE) and not self.is_dropped:
            count += 1
            try:
                require_newest(self._store, self.epoch)
                put_heartbeat(self._store, self.epoch, b"%d\n" % count)
                is_failing = False
            except ConflictError as over:
                logger.warning("%s", over)
                _living.pop(self._holder.nonce, None)
                return
            except Exception as error:  # noqa: BLE001 - it may pass, and silence would let another writer in
                if not is_failing:
                    logger.warning("epoch %d: no sign of life could be given, trying on: %r", self.epoch, error)
                is_failing = True
        self._release()

    def _release(self) -> None:
        try:
            epoch = read_epoch(self._store, self.epoch)
            if epoch is not None and epoch.holder.nonce == self._holder.nonce:
                put_heartbeat(self._store, self.epoch, RELEASED)
        except Exception as error:  # noqa: BLE001 - who ends is not held up by it
            logger.warning("epoch %d could not be released, the next writer may have to wait: %r", self.epoch, error)
        finally:
            _living.pop(self._holder.nonce, None)


_living: dict[str, _Heartbeat] = {}
"""By nonce, what epochs this process holds or is about to."""


@atexit.register
def _release_all() -> None:
    """Let the next one in at once, where a process ends without closing its managers."""
    clock = SystemClock()  # An exit hook has no caller that could pass one.
    last = clock.monotonic_seconds() + _RELEASE_SECONDS_MAX
    pulses = list(_living.values())
    for pulse in pulses:
        pulse.stop()
    for pulse in pulses:
        pulse.end(max(last - clock.monotonic_seconds(), 0.0))


@contextmanager
def held(store: Store, clock: Clock, lease_seconds: float, run_id: str) -> Iterator[WriterLease]:
    """Hold the epoch of a run for the length of a block, in a process that does not train.

    Raises:
        ConflictError: Another process holds it.
    """
    writer_lease = WriterLease(store, clock, lease_seconds)
    writer_lease.hold(run_id)
    try:
        yield writer_lease
    finally:
        writer_lease.release()


def _await_the_end(store: Store, clock: Clock, number: int, lease_seconds: float) -> None:
    """Return once the holder of an epoch is certain, or presumed, to be done.

    Raises:
        ConflictError: It gives signs of life.
    """
    seen = _beat_of(store, number)
    if seen == RELEASED:
        return
    holder = None
    try:
        epoch = read_epoch(store, number)
        holder = None if epoch is None else epoch.holder
    except (CorruptError, InvalidError) as error:
        logger.warning("who holds epoch %d cannot be read, so it is watched: %s", number, error)
    if holder is not None:
        if is_this_process(holder):
            if _is_living(holder):
                gc.collect()  # One that was let go of may only wait for this.
            if _is_living(holder):
                raise _taken(
                    store,
                    number,
                    "another CheckpointManager of this very process: close it first, or let go of what still refers "
                    "to it (by its frames, an exception that is being handled or the handle of a save that failed)",
                )
            return
        if is_gone(holder):
            logger.info("epoch %d is taken over at once, its process runs no more: %s", number, holder)
            return
        lease_seconds = holder.lease_seconds
    start = clock.monotonic_seconds()
    logger.warning(
        "%s is held by %s: waiting up to %.1f s for a sign of life",
        store.url,
        format_holder(store, number),
        lease_seconds,
    )
    # What decides is a look that began after the lease ran out: one before it may have been answered late.
    while True:
        waited = clock.monotonic_seconds() - start
        heartbeat = _beat_of(store, number)
        if heartbeat != seen and heartbeat != RELEASED:
            raise _taken(store, number, "it gives signs of life")
        if heartbeat == RELEASED or waited >= lease_seconds:
            break
        clock.sleep(lease_seconds / _LOOKS_PER_LEASE)
    logger.warning("epoch %d is taken over after %.1f s", number, waited)


def _is_living(holder: Holder) -> bool:
    pulse = _living.get(holder.nonce)
    return pulse is not None and not pulse.is_dropped


def _beat_of(store: Store, number: int) -> bytes | None:
    """Return an epoch's last sign of life; where there is something else in its place, that does not change."""
    try:
        return read_heartbeat(store, number)
    except (CorruptError, InvalidError) as error:
        logger.debug("the beat of epoch %d cannot be read, so it is watched: %s", number, error)
        return _UNREADABLE


def _taken(store: Store, number: int, why: str) -> ConflictError:
    return ConflictError(
        f"{store.url}: another job writes here: {format_holder(store, number)}; {why}. Expected to be the only writer "
        "of this run. Nothing was touched. Stop one of them, or save elsewhere"
    )
