"""The claim of a job on one checkpoint that it overwrites: one job at a time, for as long as its saves there take.

The states of a `PathClaim`, and who moves it on:

    waiting   `take_path_claim` found the claim of another process, and watches its heartbeat.
    held      The claim is stored. A thread renews its heartbeat three times per lease time.
    lost      Another process has taken over. Nobody notices until `require_claim`, right before the manifest is
              replaced.
    released  The claim is deleted.

    waiting -> held      the other claim was released, its process is gone, or its heartbeat stopped
    waiting -> waiting   a further save of the same job at the path waits for the first one, and then shares the claim
    held -> held         a further save of the same job at the path shares the claim
    held -> lost         another process; only if it sees no heartbeat for the lease time
    held, lost -> released   `release()` of the last save that shares it

The claim is for politeness: a second job is refused before it writes. What keeps a checkpoint whole without any clock
is in `stored/repository/overwriting.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress

from holdfast.base.clock import Clock
from holdfast.base.interrupts import start_thread
from holdfast.base.ports.store import Store
from holdfast.errors import CheckpointError, ConflictError, UnavailableError
from holdfast.stored.leases.process import is_gone, this_process
from holdfast.stored.repository.overwriting import (
    ClaimRecord,
    claim_of,
    clear_away,
    put_claim,
    put_claim_beat,
    read_claim,
    read_claim_beat,
    release_claim,
    remove_claim_beat,
    take_claim_away,
)

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_POLLS_PER_LEASE = 50
_TRIES = 10
_RELEASE_SECONDS_MAX = 5.0


class PathClaim:
    """The right of one job to overwrite the checkpoint at a path."""

    def __init__(self, store: Store, clock: Clock, lease_seconds: float, owner: object) -> None:
        """Store nothing yet; arguments as `take_path_claim`."""
        self._store, self._clock, self._lease_seconds = store, clock, lease_seconds
        self.key = store.url, owner
        """What saves that share it have in common."""
        self.shared_by = 0
        """Saves under way that hold it, or wait for it."""
        self.is_held = False
        self.is_settled = threading.Event()
        """Set once it is held, or could not be taken."""
        self.holder = this_process(clock, lease_seconds)
        """This process, with a nonce of this claim."""
        self._data = claim_of(self.holder)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="holdfast-claim", daemon=True)

    def take(self) -> None:
        """Store the claim, and remove what other claims have left.

        Raises:
            ConflictError: Another job overwrites the checkpoint; the message names it.
            UnavailableError: Storage failed, or no thread could be started.
        """
        for _ in range(_TRIES):
            if put_claim(self._store, self._data):
                try:
                    self._start()
                    # Before another save shares the claim: what that one prepares must stay.
                    clear_away(self._store, self.holder.nonce)
                except BaseException:
                    self.release()
                    raise
                return
            found = read_claim(self._store)
            if found is not None and self._is_dead(found):
                logger.warning("%s: a claim that nobody renews is cleared away", self._store.url)
                take_claim_away(self._store, found.data)
        raise ConflictError(f"{self._store.url}: other jobs overwrite this checkpoint too; expected one. Try again")

    def _start(self) -> None:
        try:
            start_thread(self._thread)
        except RuntimeError as error:
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
        try:
            try:
                # Before the heartbeat stops: storage may be slow, and another job would take the claim over meanwhile.
                release_claim(self._store, self._data)
            finally:
                self._stopped.set()
                if self._thread.is_alive():
                    # It must not renew a heartbeat that is removed. If storage hangs, the next overwrite removes it.
                    self._thread.join(_RELEASE_SECONDS_MAX)
            remove_claim_beat(self._store, self.holder.nonce)
        except CheckpointError as error:
            logger.warning("%s: the claim on it stays until this process ends: %s", self._store.url, error)

    def _renew(self) -> None:
        count = 0
        while not self._stopped.wait(self._lease_seconds / _RENEWALS_PER_LEASE):
            count += 1
            with suppress(CheckpointError):  # It may pass. Without a heartbeat another job takes over.
                put_claim_beat(self._store, self.holder.nonce, count)


_held: dict[tuple[str, object], PathClaim] = {}
"""The claims that jobs of this process take or hold, by URL of the store and owner."""

# Guards `_held` and the counts, for moments. Of a job that saves, only background threads take it: no signal handler
# that saves has interrupted a thread that holds it.
_lock = threading.Lock()


def _forget_threads() -> None:
    """Do without the lock of the parent, which a thread of it may have held, and without its claims."""
    global _lock
    _lock = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_forget_threads)


def take_path_claim(store: Store, clock: Clock, lease_seconds: float, owner: object) -> PathClaim:
    """Return a claim on the checkpoint of a store. End it with `release_path_claim`.

    Saves of one job at one path share a claim. Of several at once, on several threads, one takes it and the others
    wait. If it fails, the next one tries.

    Args:
        store: Holds the checkpoint.
        clock: Measures how long the heartbeat of another process stays the same.
        lease_seconds: How long the claim counts without a heartbeat.
        owner: What the saves of one job have in common.
    Raises:
        ConflictError: Another job overwrites the checkpoint.
    """
    while True:
        with _lock:
            claim = _held.get((store.url, owner))
            is_new = claim is None
            if claim is None:
                claim = _held[store.url, owner] = PathClaim(store, clock, lease_seconds, owner)
            claim.shared_by += 1
        if is_new:
            _take(claim)
        claim.is_settled.wait()
        if claim.is_held:
            return claim


def _take(claim: PathClaim) -> None:
    try:
        claim.take()
        claim.is_held = True
    finally:
        if not claim.is_held:
            with _lock:
                del _held[claim.key]
        claim.is_settled.set()


def release_path_claim(claim: PathClaim) -> None:
    """End one use of a claim; the last one releases it. Never raises."""
    with _lock:
        claim.shared_by -= 1
        if claim.shared_by:
            return
        _held.pop(claim.key, None)  # A fork has forgotten it.
    claim.release()
