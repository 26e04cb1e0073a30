"""Announcements: rank 0 publishes the time and the save requests by which every rank decides which steps to save.

Announcement n has a key of its own in the key-value store. It holds for the steps after those of announcement n - 1, up
to its own last step. Rank 0 announces about a second ahead of its own steps, so about one key a second is written.

The states of an announcement, and who moves it on:

    pending    Not stored. A rank whose steps come past announcement n - 1 waits for it, with a deadline.
    stored     The key holds it. It never changes: a repeated try of rank 0 keeps what an earlier try stored.
    in force   A rank decides its steps by it. Each rank reads announcements in order, and at its own time.
    removed    The keys of a block of 64 are deleted.

    pending -> stored      rank 0, in `announcer.py`, by compare-and-set on the empty key
    stored -> in force     each rank for itself, in `announcement_for()`, usually read before by `read_ahead()`
    in force -> removed    rank 0, once every other rank has counted the whole block as read

Rank 0 never waits for another rank, so no two ranks can wait for each other. The key-value store is the only source:
every rank, rank 0 included, takes all announcements from it in order. A rank that misses one decides late, never
differently.

No rank makes a call to the key-value store on its training thread: all ranks come to the same step at one time, and the
store would answer them one after the other. Only a rank whose step has no announcement yet waits for such a call.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from holdfast.core.engine.background import DAEMON_POOL, BackgroundQueue, wait_in_slices
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.training.coordination.announcer import BLOCK, LATE_SECONDS, Announcer
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.message_codec import decode_message
from holdfast.training.coordination.save_due import Announcement, LastSave

logger = logging.getLogger(__name__)


class Announcements:
    """The announcements of a run, on one rank: rank 0 stores them, every rank reads them."""

    def __init__(self, job: Job, name: str) -> None:
        self._name, self._job, self._key_value_store = name, job, job.key_value_store
        # The training thread waits: not for as long as a collective of the training, in which rank 0 may wait for it.
        self._timeout_seconds = job.agreement_seconds
        self._generation = -1
        self._is_patient = True
        # Calls that wait for no other rank: interpreter exit may wait for them.
        self._calls = BackgroundQueue("holdfast-announcements", job.progress)
        self.restart()

    def restart(self) -> None:
        """Begin again under new keys. Every rank does so when its loop goes back to an earlier step."""
        self._generation += 1
        self.in_force: Announcement | None = None
        """The announcement for the last step; None before the first one was read."""
        # Not on rank 0: announcements read, the last look for the next one, and with how many steps left the next look
        # begins.
        self._count = 0
        self._look: Future[bytes | None] | None = None
        self._look_below = 0
        self._announcer = None
        if self._job.comm.rank == 0:
            key_of = partial(self._job.key, self._name, self._generation)
            self._announcer = Announcer(self._job, key_of, self._calls)

    def request(self, step: int) -> None:
        """Ask rank 0 for a save of `step` or of one soon after it."""
        if self._announcer is not None:
            self._announcer.request(step)
        else:
            self._calls.submit_short(partial(self._ask, step, self._generation))

    def announce(self, step: int, last_save: LastSave) -> None:
        """Have the next announcement stored if the steps covered so far end soon; only rank 0 does anything.

        Args:
            step: The current step of rank 0.
            last_save: The last save, as rank 0 knows it.
        """
        failure = None if self._announcer is None else self._announcer.announce(step, last_save)
        if failure is not None:
            self._warn(step, failure)

    def announcement_for(self, step: int) -> Announcement | None:
        """Return the announcement in force at a step; None if it cannot be read, which never ends training."""
        try:
            while self.in_force is None or self.in_force.until < step:
                self.in_force = self._read_next()
                self._is_patient = True
                self._look_below = (self.in_force.until - step) // 2
        except (CheckpointError, TimeoutError) as error:
            self._warn(step, error)
            return None
        return self.in_force

    def read_ahead(self, step: int) -> None:
        """Look for the next announcement on another thread, once half of the steps of this one are over. Never waits.

        Call it at a step that is not saved: a look beside the agreement on a save needs one more connection.
        """
        if self._job.comm.rank == 0 or self.in_force is None or (self._look is not None and not self._look.done()):
            return
        left = self.in_force.until - step
        if left <= self._look_below and self._looked() is None:
            # Rank 0 may be late: look again each time that half of the steps left are over.
            self._look_below = left // 2
            self._begin_look()

    def _warn(self, step: int, error: Exception) -> None:
        if self._is_patient:
            logger.warning(
                "step %d: announcements of rank 0 are not available: %s. Until they are, rules by time and by request "
                "save nothing; rules by step still apply",
                step,
                error,
            )
        # Wait only once: otherwise every further step would wait for the whole timeout. Later steps only look.
        self._is_patient = False

    def _read_next(self) -> Announcement:
        """Return the next announcement; wait for it if rank 0 has not stored it."""
        if self._announcer is not None:
            return self._announcer.next()
        data = self._looked()
        if data is None:
            data = self._awaited() if self._is_patient else self._looked_again()
        self._look = None
        self._count += 1
        if self._count % BLOCK == 0:
            self._calls.submit_short(partial(self._count_as_read, self._key("read", self._count // BLOCK - 1)))
        return decode_message(data, Announcement)

    def _awaited(self) -> bytes:
        """Return the next announcement once rank 0 has stored it. Another thread asks, so that this one hears signals.

        Raises:
            TimeoutError: Rank 0 has stored none in time.
            UnavailableError: The key-value store failed.
        """
        ask = partial(self._get, self._key("told", self._count))
        try:
            call = DAEMON_POOL.submit(ask)
        except UnavailableError:
            return ask()  # No thread. To decide without the announcement would part this rank from the others.
        # No longer, although a call may take twice its limit: other ranks may wait in a collective.
        return wait_in_slices(call, self._timeout_seconds + LATE_SECONDS, self._job.clock, lambda: None)

    def _looked_again(self) -> bytes:
        """Return nothing: begin another look, whose result a later step takes.

        Raises:
            TimeoutError: Always.
        """
        if self._look is None or self._look.done():
            self._begin_look()
        raise TimeoutError(f"{self._key('told', self._count)}: not set; expected an announcement of rank 0")

    def _begin_look(self) -> None:
        self._look = self._calls.submit_short(partial(self._find, self._key("told", self._count)))  # type: ignore[assignment]

    def _looked(self) -> bytes | None:
        """Return the next announcement if the last look has found it; without waiting."""
        look = self._look
        return look.result() if look is not None and look.done() and look.exception() is None else None

    def _find(self, key: str) -> bytes | None:
        """Return the value of a key, None if it is not set; without waiting for another rank."""
        return self._get(key) if self._key_value_store.present(key) else None

    def _get(self, key: str) -> bytes:
        (data,) = self._key_value_store.get_many([key], self._timeout_seconds)
        return data

    def _count_as_read(self, key: str) -> None:
        """Count a block of announcements as read by this rank."""
        # A failed count does no harm: a rank that counts a later block has read this one.
        with suppress(CheckpointError, TimeoutError):
            self._key_value_store.add(key, 1, self._timeout_seconds)

    def _ask(self, step: int, generation: int) -> None:
        """Ask rank 0 for a save, on another thread; a failure is logged."""
        try:
            # The count first: rank 0 finds requests by their numbers.
            key = self._job.key(self._name, generation, "asks")
            number = self._key_value_store.add(key, 1, self._timeout_seconds)
            key = self._job.key(self._name, generation, "ask", number)
            self._key_value_store.set(key, str(step).encode(), self._timeout_seconds)
        except (CheckpointError, TimeoutError) as error:
            logger.warning("step %d: the requested save cannot be announced: %s. Request it again", step, error)

    def _key(self, *parts: object) -> str:
        return self._job.key(self._name, self._generation, *parts)
