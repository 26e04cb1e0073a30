"""Reading a step so that nobody collects it meanwhile: a lease that is renewed, and leases as a collector sees them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.clock import Clock
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.leases.process import can_be_seen, is_gone, this_process
from holdfast.ports.store import Store
from holdfast.repository.catalog import exists, manifest_digest
from holdfast.repository.epochs import RELEASED, newest_epoch, read_epoch, read_heartbeat
from holdfast.repository.leases import leases, put_lease
from holdfast.repository.removal import marks
from holdfast.types.epoch import Holder
from holdfast.types.manifest import Manifest

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_LOOKS_PER_LEASE = 50


def is_being_deleted(store: Store, clock: Clock, step: int, digest: str) -> bool:
    """Return whether a step is just being removed by somebody who may still be at it.

    Args:
        store: The root of the run.
        clock: To watch a holder on another machine by.
        step: The step.
        digest: Digest of its manifest.
    """
    epochs = {each.epoch for each in marks(store) if each.is_carried_out and each.steps.get(step) == digest}
    return any(_is_held(store, clock, epoch) for epoch in epochs)


def _is_held(store: Store, clock: Clock, epoch: int) -> bool:
    """Return whether an epoch has a holder at work; where that cannot be seen, after watching its beat."""
    try:
        if epoch != newest_epoch(store) or read_heartbeat(store, epoch) == RELEASED:
            return False
        record = read_epoch(store, epoch)
        if record is None or is_gone(record.holder):
            return False
        if can_be_seen(record.holder):
            return True
        seen, start = read_heartbeat(store, epoch), clock.monotonic_seconds()
        while clock.monotonic_seconds() - start <= record.holder.lease_seconds:
            clock.sleep(record.holder.lease_seconds / _LOOKS_PER_LEASE)
            if (heartbeat := read_heartbeat(store, epoch)) != seen:
                return heartbeat != RELEASED
    except (CorruptError, InvalidError):
        return False  # Who is late by a moment will be told that the step is gone.
    return False


class ReaderLease:
    """What one process reads of a run, said beside it for as long as it lasts."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        """Say nothing yet.

        Args:
            clock: For who this is.
            lease_seconds: How long silence is taken for reading on.
        """
        self._clock, self._lease_seconds = clock, lease_seconds
        self._holder: Holder | None = None
        self._said: tuple[Store, int] | None = None
        self._key: str | None = None
        self._count = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, location: CheckpointLocation, manifest: Manifest) -> None:
        """Say that a step is read, before its packs are relied on.

        A checkpoint that belongs to no run needs no saying. On a root that may not be written nothing is said, and the
        reader has the grace of a collection to finish in.

        Args:
            place: Where it lies.
            manifest: Its commit record.
        Raises:
            MissingError: It is just being collected, or was.
        """
        if location.root is None or manifest.step is None or not manifest.attempt:
            return
        gone = MissingError(f"{location.url}: is being collected, for no policy keeps it; choose another step")
        try:
            is_there = manifest_digest(location.root, manifest.step) is not None
        except InvalidError:
            if location.step is not None:
                raise
            return  # Opened by path under a folder that may not be looked at: it was taken to lie alone.
        if not is_there:
            if location.step is None and exists(location.store, location.manifest_key):
                return  # Opened by path, in a folder of another name than its step's: no collector knows it.
            raise gone
        with self._lock:
            self._said = location.root, manifest.step
            is_said = self._put()
        # Looked for after it was said: whoever removes it sees the one, or we see the other.
        is_there = manifest_digest(location.root, manifest.step) == manifest.digest
        if not is_there or is_being_deleted(location.root, self._clock, manifest.step, manifest.digest):
            raise gone
        if is_said and self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="holdfast-reader", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Take back what was said. Never raises."""
        self._stopped.set()
        with self._lock:
            key, self._key = self._key, None
            if key is not None and self._said is not None:
                with suppress(CheckpointError):  # Whoever finds it sees that nobody renews it.
                    self._said[0].delete([key])

    def _put(self) -> bool:
        assert self._said is not None, "called once something is read"
        store, step = self._said
        if self._holder is None:
            self._holder = this_process(self._clock, self._lease_seconds)
        self._count += 1
        try:
            self._key = put_lease(store, self._holder, step, self._count)
        except CheckpointError as error:
            logger.debug("step %d is read without a lease: %s", step, error)
            return False
        return True

    def _renew(self) -> None:
        while not self._stopped.wait(self._lease_seconds / _RENEWALS_PER_LEASE):
            with self._lock:
                if self._key is not None:
                    self._put()


@contextmanager
def reader_lease(clock: Clock, lease_seconds: float) -> Iterator[ReaderLease]:
    """Give a block what it says its reading with, and take back what it said."""
    said = ReaderLease(clock, lease_seconds)
    try:
        yield said
    finally:
        said.end()


class ReaderLeases:
    """The leases of a run as one collector sees them, told dead from alive by its own clock."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._seen: dict[str, tuple[bytes, float]] = {}

    def seconds_to_watch(self) -> float:
        """Return how long the leases must be watched until those of the dead are known; 0 if there are none."""
        self.holds(forget=False)
        return max(
            (
                _UNREADABLE_SECONDS if each.holder is None else each.holder.lease_seconds
                for each in leases(self._store)
                if each.holder is None or not can_be_seen(each.holder)
            ),
            default=0.0,
        )

    def holds(self, *, forget: bool) -> dict[int | None, str]:
        """Return the steps that somebody reads, each with who; None stands for a lease that names no step.

        A lease is dead if its process was here and runs no more; of a process that cannot be seen from here, if nothing
        renewed it for as long as it said, since this collector saw it first.

        Args:
            forget: Whether dead ones are removed.
        """
        now = self._clock.monotonic_seconds()
        found: dict[int | None, str] = {}
        dead = []
        known = leases(self._store)
        seen = self._seen
        self._seen = {
            each.key: seen[each.key] if each.key in seen and seen[each.key][0] == each.data else (each.data, now)
            for each in known
        }
        for each in known:
            silent = now - self._seen[each.key][1]
            if each.holder is None:
                # Whose it is nobody can say; it is no reader's for longer than anybody may be silent.
                is_dead = silent >= _UNREADABLE_SECONDS
            elif can_be_seen(each.holder):
                is_dead = is_gone(each.holder)
            else:
                is_dead = silent >= each.holder.lease_seconds
            if is_dead:
                dead.append(each.key)
            else:
                found[each.step] = "unknown" if each.holder is None else str(each.holder)
        if dead and forget:
            self._store.delete(dead)
        return found


_UNREADABLE_SECONDS = 10.0
"""How long a lease that cannot be read is taken for a reader's: it may be just being written."""
