"""The claim of a job on one checkpoint that it overwrites: one job at a time, for as long as its saves there take.

The states of a `PathClaim`, and who moves it on:

    waiting   `take_path_claim` found the claim of another process, and watches its heartbeat.
    held      The claim is stored. A thread renews its heartbeat three times per lease time.
    lost      Another process has taken over. Nobody notices until `require_claim`, right before the manifest is
              replaced.
    released  The claim is deleted.

    waiting -> held      the other claim was released, its process is gone, or its heartbeat stopped
    held -> held         a further save of the same job at the path shares the claim
    held -> lost         another process; only if it sees no heartbeat for the lease time
    held, lost -> released   `release()` of the last save that shares it

The claim is for politeness: a second job is refused before it writes. What keeps a checkpoint whole without any clock
is in `repository/overwriting.py`.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from holdfast.clock import Clock
from holdfast.errors import CheckpointError, ConflictError, UnavailableError
from holdfast.leases.process import is_gone, this_process
from holdfast.ports.store import Store
from holdfast.repository.overwriting import (
    ClaimRecord,
    claim_of,
    put_claim,
    put_claim_beat,
    read_claim,
    read_claim_beat,
    release_claim,
    take_claim_away,
)

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_POLLS_PER_LEASE = 50
_TRIES = 10
_DRAW_BYTES = 8
_RELEASE_SECONDS_MAX = 5.0


class PathClaim:
    """The right of one job to overwrite the checkpoint at a path."""

    def __init__(self, store: Store, clock: Clock, lease_seconds: float, owner: object) -> None:
        """Store nothing yet; arguments as `take_path_claim`."""
        self._store, self._clock, self._lease_seconds = store, clock, lease_seconds
        self.owner = owner
        """The job, or what its saves share."""
        self.shared_by = 1
        """Saves under way that hold it."""
        self.holder = this_process(clock, lease_seconds)
        """This process, with a nonce of this claim."""
        self._data = claim_of(self.holder)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="holdfast-claim", daemon=True)

    def take(self) -> None:
        """Store the claim.

        Raises:
            ConflictError: Another job overwrites the checkpoint; the message names it.
            UnavailableError: Storage failed, or no thread could be started.
        """
        for _ in range(_TRIES):
            if put_claim(self._store, self._data):
                self._start()
                return
            found = read_claim(self._store)
            if found is not None and self._is_dead(found):
                logger.warning("%s: a claim that nobody renews is cleared away", self._store.url)
                take_claim_away(self._store, found.data, self._clock.random_bytes(_DRAW_BYTES))
        raise ConflictError(f"{self._store.url}: other jobs overwrite this checkpoint too; expected one. Try again")

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self.release()
            raise UnavailableError(
                f"{self._store.url}: no thread could be started for the heartbeat of the overwrite ({error}); expected "
                "one. End some threads or raise the limit (ulimit -u), then try again"
            ) from error

    def _is_dead(self, found: ClaimRecord) -> bool:
        """Return whether the process of a claim is gone, or renewed nothing for its lease time; False if it released.

        Raises:
            ConflictError: It renews its heartbeat.
        """
        holder = found.holder
        if holder is not None and is_gone(holder):
            return True
        nonce, lease_seconds = ("", self._lease_seconds) if holder is None else (holder.nonce, holder.lease_seconds)
        first_beat = read_claim_beat(self._store, nonce) if nonce else None
        start = self._clock.monotonic_seconds()
        while True:
            # The time first: only a read that began after the lease ran out may decide.
            waited = self._clock.monotonic_seconds() - start
            beat = read_claim_beat(self._store, nonce) if nonce else None
            current = read_claim(self._store)
            if current is None or current.data != found.data:
                return False
            if beat != first_beat:
                raise ConflictError(
                    f"{self._store.url}: another job overwrites this checkpoint: {holder}. Expected to be the only "
                    "one. Nothing was touched. Wait until it is done, or save elsewhere"
                )
            if waited >= lease_seconds:
                return True
            self._clock.sleep(lease_seconds / _POLLS_PER_LEASE)

    def release(self) -> None:
        """Give the claim up. Never raises."""
        self._stopped.set()
        if self._thread.is_alive():
            # It must not renew a heartbeat that is removed. If storage hangs, the next overwrite removes it.
            self._thread.join(_RELEASE_SECONDS_MAX)
        try:
            release_claim(self._store, self._data, self.holder.nonce)
        except CheckpointError as error:
            logger.warning("%s: the claim on it stays until this process ends: %s", self._store.url, error)

    def _renew(self) -> None:
        count = 0
        while not self._stopped.wait(self._lease_seconds / _RENEWALS_PER_LEASE):
            count += 1
            with suppress(CheckpointError):  # It may pass. Without a heartbeat another job takes over.
                put_claim_beat(self._store, self.holder.nonce, count)


_held: dict[str, PathClaim] = {}
"""The claims that jobs of this process hold, by URL of the store."""

_lock = threading.Lock()


def take_path_claim(store: Store, clock: Clock, lease_seconds: float, owner: object) -> tuple[PathClaim, bool]:
    """Return a claim on the checkpoint of a store, and whether it is new. End it with `release_path_claim`.

    Saves of one job at one path end in the order in which they began, so they share a claim.

    Args:
        store: Holds the checkpoint.
        clock: Measures how long the heartbeat of another process stays the same.
        lease_seconds: How long the claim counts without a heartbeat.
        owner: What the saves of one job have in common.
    Raises:
        ConflictError: Another job overwrites the checkpoint.
    """
    with _lock:
        held = _held.get(store.url)
        if held is not None and held.owner is owner:
            held.shared_by += 1
            return held, False
    claim = PathClaim(store, clock, lease_seconds, owner)
    claim.take()
    with _lock:
        _held[store.url] = claim
    return claim, True


def release_path_claim(claim: PathClaim) -> None:
    """End one use of a claim; the last one releases it. Never raises."""
    with _lock:
        claim.shared_by -= 1
        if claim.shared_by:
            return
        for url in [url for url, held in _held.items() if held is claim]:
            del _held[url]
    claim.release()
