"""Reader leases: a process that reads a step stores a lease, so that garbage collection keeps the step.

A lease is one object under `readers/`. The states of a `ReaderLease`, and who moves it on:

    idle      Nothing is stored.
    stored    The object names the step. A thread rewrites it three times per lease time.
    ended     The object is deleted, or is left for a collector to delete. For a collector of the same process it is
              dead at once, for others as if the process had it still.

    idle -> stored     `announce()` or `begin()`; on a root without write access the lease stays idle, and the read
                       relies on the grace of the collection alone
    stored -> stored   the same with another step, for a reader that falls back to an older one
    stored -> ended    `close()`, or the exit of the process

A collector sees each lease in one of two states (`ReaderLeases`):

    alive     Its process runs on this host; or the collector saw the object change within the lease time.
    dead      Its process has exited on this host; or the object did not change for the lease time. The holder of
              the writer lease deletes it.

Reader and collector cannot miss each other. The reader stores its lease, then looks for the mark of a collection. The
collector stores its mark, then looks for leases. At least one of them sees the other. A reader that announces itself
reads the manifest last: if the collection is over by the look at the marks, the manifest is gone.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from holdfast.base.clock import Clock
from holdfast.base.interrupts import start_thread
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Holder
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.holders import HolderDocument, decode_holder, encode_holder
from holdfast.core.format.sealed_json import StepNumber, decode_sealed, header, sealed
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.process import can_be_seen, is_gone, this_process
from holdfast.stored.repository.catalog import exists, manifest_digest
from holdfast.stored.repository.epochs import RELEASED, newest_epoch, read_epoch, read_heartbeat
from holdfast.stored.repository.removal import marks
from holdfast.stored.repository.timelines import holds_manifest

READERS_FOLDER = "readers/"
"""Folder of the leases, under the root of a run."""

_KEY = re.compile(r"readers/[0-9a-f]{32}\.json", re.ASCII)
_LEASE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Lease:
    """One reader of one step."""

    key: str
    """Key of the record."""

    data: bytes
    """The record as stored. Every renewal changes the record."""

    step: int | None
    """The step that the process reads; None if the record is unreadable: it may then be any step."""

    holder: Holder | None
    """The reading process; None if the record is unreadable."""


class _LeaseDocument(msgspec.Struct):
    step: StepNumber
    holder: HolderDocument


def put_lease(store: Store, holder: Holder, step: int, count: int) -> str:
    """Put or renew a lease, and return the key of its record.

    Args:
        store: The root of the run.
        holder: The reading process.
        step: The step that it reads.
        count: Number of renewals, so that each one changes the record.
    """
    key = f"{READERS_FOLDER}{holder.nonce}.json"
    fields = {"holder": encode_holder(holder), "step": step, "count": count}
    # Not durable: a lease need not survive a power cut, because its reader does not.
    store.put(key, sealed(header("reader") | fields), durable=False)
    return key


def leases(store: Store) -> list[Lease]:
    """Return all leases under a root."""
    listed = []
    for entry in store.list(READERS_FOLDER):
        if not _KEY.fullmatch(entry.key):
            continue
        data = b""
        try:
            data = store.get(entry.key, _LEASE_BYTES_MAX)
            document, _ = decode_sealed(data, "reader", _LeaseDocument, f"{store.url}/{entry.key}")
            listed.append(Lease(entry.key, data, document.step, decode_holder(document.holder)))
        except MissingError:
            continue  # The reader finished after we listed it.
        except (CorruptError, InvalidError):
            listed.append(Lease(entry.key, data, None, None))
    return listed


logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_POLLS_PER_LEASE = 50

_left: set[str] = set()
"""Keys of leases of this process that ended, and that the store did not delete. No two leases have the same key."""

_UNREADABLE_SECONDS = 10.0
"""How long a lease that cannot be read counts as alive: its reader may be writing it."""


def is_being_deleted(store: Store, clock: Clock, step: int, digest: str) -> bool:
    """Return whether a collection that may still run is removing a step.

    Args:
        store: The root of the run.
        clock: Measures how long the heartbeat of a collector on another host stays the same.
        step: The step.
        digest: Digest of its manifest.
    """
    return digest in _digests_being_deleted(store, clock, step)


def _digests_being_deleted(store: Store, clock: Clock, step: int) -> set[str]:
    """Return the digests of the manifests of a step that collections which may still run are removing."""
    digests = set[str]()
    for mark in marks(store):
        named = {digest for number, digest in mark.steps if number == step}
        if mark.is_carried_out and not named <= digests and _is_held(store, clock, mark.epoch):
            digests |= named
    return digests


def _is_held(store: Store, clock: Clock, epoch: int) -> bool:
    """Return whether the holder of an epoch still runs; on another host, whether its heartbeat changes in time."""
    try:
        if epoch != newest_epoch(store) or read_heartbeat(store, epoch) == RELEASED:
            return False
        record = read_epoch(store, epoch)
        if record is None or is_gone(record.holder):
            return False
        if can_be_seen(record.holder):
            return True
        first_heartbeat, start = read_heartbeat(store, epoch), clock.monotonic_seconds()
        while clock.monotonic_seconds() - start <= record.holder.lease_seconds:
            clock.sleep(record.holder.lease_seconds / _POLLS_PER_LEASE)
            if (heartbeat := read_heartbeat(store, epoch)) != first_heartbeat:
                return heartbeat != RELEASED
    except (CorruptError, InvalidError):
        return False  # Damaged records: if a collector does run, the read fails with the step removed.
    return False


class ReaderLease:
    """The lease of one process on the step that it reads."""

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        """Store nothing yet.

        Args:
            clock: Gives the holder its start time and nonce.
            lease_seconds: How long the lease counts without a renewal.
        """
        self._clock, self._lease_seconds = clock, lease_seconds
        self._holder: Holder | None = None
        self._subject: tuple[Store, int] | None = None
        self._key: str | None = None
        self._announced: int | None = None
        self._being_deleted: Collection[str] = ()
        self._count = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def announce(self, location: CheckpointLocation) -> None:
        """Store the lease on a step of a run whose manifest is read after this call, and look for marks.

        A second call for the same step does nothing. A location that names no step of a run gets its lease in `begin`.
        """
        if location.root is None or location.step is None or location.step == self._announced:
            return
        with self._lock:
            self._subject = location.root, location.step
            is_stored = self._put()
        # Only after the lease is stored: a collection that missed the lease has stored its mark by now. Whether that
        # still runs is asked now, too: if it is over, the manifest is gone before it is read.
        self._being_deleted = _digests_being_deleted(location.root, self._clock, location.step)
        self._announced = location.step
        self._keep_renewing(is_stored=is_stored)

    def begin(self, location: CheckpointLocation, manifest: Manifest) -> None:
        """Store the lease on a step, before any of its packs is read.

        A checkpoint outside a run needs no lease. On a root without write access none is stored: the reader then has
        to finish within the grace of a collection.

        Args:
            location: The checkpoint.
            manifest: Its manifest.
        Raises:
            MissingError: The step was removed, or is being removed.
        """
        if location.root is None or manifest.step is None or not manifest.attempt:
            return
        removed = MissingError(f"{location.url}: is being deleted: no retention policy keeps it. Choose another step")
        if self._announced is not None and self._announced == location.step == manifest.step:
            if manifest.digest in self._being_deleted:
                raise removed
            return
        key = location.moved_manifest
        try:
            is_in_run = manifest_digest(location.root, manifest.step, key) is not None or holds_manifest(
                location.root, manifest.step, manifest.digest, key
            )
        except InvalidError:
            if location.step is not None:
                raise
            return  # Opened by path, below a folder without read access: treated as a checkpoint outside a run.
        if not is_in_run:
            if location.step is None and exists(location.store, location.manifest_key):
                return  # Opened by path, in a folder not named after its step: no collection removes it.
            raise removed
        with self._lock:
            self._subject = location.root, manifest.step
            is_stored = self._put()
        # Only after the lease is stored: a collection that missed the lease has stored its mark by now.
        is_unchanged = holds_manifest(location.root, manifest.step, manifest.digest, key)
        if not is_unchanged or is_being_deleted(location.root, self._clock, manifest.step, manifest.digest):
            raise removed
        self._keep_renewing(is_stored=is_stored)

    def _keep_renewing(self, *, is_stored: bool) -> None:
        if is_stored and self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="holdfast-reader", daemon=True)
            start_thread(self._thread)

    @property
    def is_stored(self) -> bool:
        """Whether the lease is stored: not on a root without write access, nor for a checkpoint outside a run."""
        return self._key is not None

    def close(self) -> None:
        """Delete the lease. Never raises."""
        self._stopped.set()
        with self._lock:
            key, self._key = self._key, None
            if key is not None and self._subject is not None:
                try:
                    self._subject[0].delete([key])
                except CheckpointError as error:
                    _left.add(key)  # The process runs on, so the lease would count as alive.
                    logger.debug("%s: a lease stays until the next collection: %s", self._subject[0].url, error)

    def _put(self) -> bool:
        assert self._subject is not None, "begin() sets it"
        store, step = self._subject
        if self._holder is None:
            self._holder = this_process(self._clock, self._lease_seconds)
        self._count += 1
        try:
            self._key = put_lease(store, self._holder, step, self._count)
        except CheckpointError as error:
            logger.debug("%s: step %d is read without a lease: %s", store.url, step, error)
            return False
        return True

    def _renew(self) -> None:
        while not self._stopped.wait(self._lease_seconds / _RENEWALS_PER_LEASE):
            with self._lock:
                if self._key is not None:
                    self._put()


class ReaderLeases:
    """The leases of a run as one collector sees them: alive or dead, by the clock of the collector."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Content of each lease by key, and when this collector saw that content first."""

    def seconds_to_watch(self) -> float:
        """Return how long to watch the leases until the dead ones are known; 0 if all processes can be seen."""
        self.holds(forget=False)
        return max(
            (
                _UNREADABLE_SECONDS if lease.holder is None else lease.holder.lease_seconds
                for lease in leases(self._store)
                if lease.holder is None or not can_be_seen(lease.holder)
            ),
            default=0.0,
        )

    def holds(self, *, forget: bool) -> dict[int | None, str]:
        """Return the steps with a live lease, each with its reader. None is the step of a lease that cannot be read.

        A lease is dead if its process ran on this host and has exited. If its process cannot be seen from here, the
        lease is dead once nobody renewed it for its lease time, counted from the first look of this collector.

        Args:
            forget: Whether to delete dead leases.
        """
        now = self._clock.monotonic_seconds()
        stored = leases(self._store)
        before, self._seen = self._seen, {}
        readers: dict[int | None, str] = {}
        dead = []
        for lease in stored:
            data, since = before.get(lease.key, (lease.data, now))
            # Changed content is a renewal: the time starts again.
            self._seen[lease.key] = (lease.data, since if data == lease.data else now)
            unchanged_seconds = now - self._seen[lease.key][1]
            if lease.key in _left:
                is_dead = True
            elif lease.holder is None:
                # Nobody knows whose lease it is. No reader leaves a lease half written for this long.
                is_dead = unchanged_seconds >= _UNREADABLE_SECONDS
            elif can_be_seen(lease.holder):
                is_dead = is_gone(lease.holder)
            else:
                is_dead = unchanged_seconds >= lease.holder.lease_seconds
            if is_dead:
                dead.append(lease.key)
            else:
                readers[lease.step] = "unknown" if lease.holder is None else str(lease.holder)
        if dead and forget:
            self._store.delete(dead)
            _left.difference_update(dead)
        return readers
