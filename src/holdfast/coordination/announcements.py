"""Announcements: rank 0 publishes the time and the save requests by which every rank decides which steps to save.

Announcement n has a key of its own in the key-value store. It holds for the steps after those of announcement n - 1, up
to its own last step. Rank 0 announces about a second ahead of its own steps, so about one key a second is written.

The states of an announcement, and who moves it on:

    pending    Not stored. A rank whose steps come past announcement n - 1 waits for it, with a deadline.
    stored     The key holds it. It never changes: a repeated try of rank 0 keeps what an earlier try stored.
    in force   A rank decides its steps by it. Each rank reads announcements in order, and at its own time.
    removed    The keys of a block of 64 are deleted.

    pending -> stored      rank 0, in `announce()`, by compare-and-set on the empty key
    stored -> in force     each rank for itself, in `announcement_for()`, usually read before by `read_ahead()`
    in force -> removed    rank 0, once every other rank has counted the whole block as read

Rank 0 never waits for another rank, so no two ranks can wait for each other. The key-value store is the only source:
every rank, rank 0 included, takes all announcements from it in order. A rank that misses one decides late, never
differently.

Ranks other than rank 0 make no call to the key-value store on the training thread to read: they come to the same step
at one time, and the store would answer them one after the other.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from holdfast.coordination.job import Job
from holdfast.coordination.message_codec import decode_message, encode_message
from holdfast.coordination.save_due import Announcement, LastSave, next_until
from holdfast.engine.background import CALLS, BackgroundQueue, wait_in_slices
from holdfast.errors import CheckpointError, UnavailableError

logger = logging.getLogger(__name__)

_BLOCK = 64
"""Announcements that a rank counts as read together, so that their keys can be removed."""

_REQUEST_SECONDS = 10.0
"""How long rank 0 waits for the step of a request that is already counted. After that it drops the request."""

_PAUSE_FACTOR = 9
"""After a failed try, rank 0 announces nothing for this many times the duration of the try.

A store that always times out then costs at most a tenth of the training time."""


class Announcements:
    """The announcements of a run, on one rank: rank 0 stores them, every rank reads them."""

    def __init__(self, job: Job) -> None:
        self._job, self._key_value_store = job, job.key_value_store
        self._timeout_seconds = job.settings.commit_timeout_seconds
        self._generation = -1
        self._is_patient = True
        # Looks, which do not wait: interpreter exit may wait for them.
        self._looks = BackgroundQueue("holdfast-announcements", job.progress)
        self.restart()

    def restart(self) -> None:
        """Begin again under new keys. Every rank does so when its loop goes back to an earlier step."""
        self._generation += 1
        self.in_force: Announcement | None = None
        """The announcement for the last step; None before the first one was read."""
        # Rank 0 counts stored announcements, every other rank counts those it has read.
        self._count = 0
        # Not on rank 0: the last look for the next announcement, and with how many steps left the next look begins.
        self._look: Future[bytes | None] | None = None
        self._look_below = 0
        # Rank 0 only: stored, and not in force yet.
        self._ahead: deque[Announcement] = deque()
        self._until: int | None = None
        self._requested: int | None = None
        self._requests_read = 0
        self._blocks_removed = 0
        self._last: tuple[int, float] | None = None
        self._strides: deque[int] = deque(maxlen=8)
        self._call_seconds: deque[float] = deque(maxlen=8)
        self._paused_until = -math.inf

    def request(self, step: int) -> None:
        """Ask rank 0 for a save of `step` or of one soon after it."""
        if self._job.comm.rank == 0:
            self._requested = max(step, self._requested or 0)
            return
        try:
            # The count first: rank 0 finds requests by their numbers.
            number = self._key_value_store.add(self._key("asks"), 1, self._timeout_seconds)
            self._key_value_store.set(self._key("ask", number), str(step).encode(), self._timeout_seconds)
        except (CheckpointError, TimeoutError) as error:
            logger.warning("step %d: the requested save cannot be announced: %s. Request it again", step, error)

    def announce(self, step: int, last_save: LastSave) -> None:
        """Store the next announcement if the steps covered so far end soon; only rank 0 does anything.

        Args:
            step: The current step of rank 0.
            last_save: The last save, as rank 0 knows it.
        """
        now = self._job.clock.monotonic_seconds()
        if self._job.comm.rank != 0:
            return
        if self._job.comm.world_size == 1:
            # No other rank: an announcement for this step alone needs no store.
            self._ahead.append(Announcement(step, now, self._requested))
            return
        if self._last is not None and step > self._last[0]:
            self._strides.append(step - self._last[0])
            self._call_seconds.append(now - self._last[1])
        self._last = step, now
        if now < self._paused_until:
            return
        try:
            while (until := next_until(step, self._until, self._strides, self._call_seconds)) is not None:
                self._read_requests()
                first = last_save if self._count == 0 else None
                self._publish(Announcement(until, now, self._requested, first))
        except (CheckpointError, TimeoutError) as error:
            self._warn(step, error)
            after = self._job.clock.monotonic_seconds()
            self._paused_until = after + _PAUSE_FACTOR * (after - now)

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
        if self._job.comm.rank == 0:
            if not self._ahead:
                raise UnavailableError(
                    "rank 0 could not store its next announcement; expected to. See the warning before"
                )
            return self._ahead.popleft()
        data = self._looked()
        if data is None:
            data = self._awaited() if self._is_patient else self._looked_again()
        self._look = None
        self._count += 1
        if self._count % _BLOCK == 0:
            self._looks.submit(partial(self._count_as_read, self._key("read", self._count // _BLOCK - 1)))
        return decode_message(data, Announcement)

    def _awaited(self) -> bytes:
        """Return the next announcement once rank 0 has stored it. Another thread asks, so that this one hears signals.

        Raises:
            TimeoutError: Rank 0 has stored none in time.
            UnavailableError: The key-value store failed.
        """
        call = CALLS.submit(partial(self._get, self._key("told", self._count)))
        # A call may take twice its limit, if its connection has to be made anew.
        return wait_in_slices(call, 3 * self._timeout_seconds, self._job.clock, lambda: None)

    def _looked_again(self) -> bytes:
        """Return nothing: begin another look, whose result a later step takes.

        Raises:
            TimeoutError: Always.
        """
        if self._look is None or self._look.done():
            self._begin_look()
        raise TimeoutError(f"{self._key('told', self._count)}: not set; expected an announcement of rank 0")

    def _begin_look(self) -> None:
        self._look = self._looks.submit(partial(self._find, self._key("told", self._count)))  # type: ignore[assignment]

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

    def _publish(self, announcement: Announcement) -> None:
        """Store an announcement, or take the one that an earlier try stored although it seemed to fail.

        A rank may have decided by the earlier one already.
        """
        key, value = self._key("told", self._count), encode_message(announcement)
        stored = self._key_value_store.compare_set(key, b"", value, self._timeout_seconds)
        announcement = decode_message(stored, Announcement)
        self._count += 1
        self._until = announcement.until
        self._ahead.append(announcement)
        if self._count % _BLOCK == 0:
            with suppress(CheckpointError, TimeoutError):
                self._remove_read()

    def _read_requests(self) -> None:
        total = self._key_value_store.add(self._key("asks"), 0, self._timeout_seconds)
        if total == self._requests_read:
            return
        keys = [self._key("ask", number) for number in range(self._requests_read + 1, total + 1)]
        with suppress(TimeoutError):
            self._key_value_store.wait(keys, _REQUEST_SECONDS)
        # A rank that failed between count and step has logged it.
        keys = [key for key in keys if self._key_value_store.present(key)]
        steps = [int(data) for data in self._key_value_store.get_many(keys, _REQUEST_SECONDS)]
        self._requests_read = total
        if steps:
            self._requested = max(*steps, self._requested or 0)
        self._key_value_store.delete(keys)

    def _remove_read(self) -> None:
        """Delete the keys of announcements that every rank has read, so that the key-value store stays small."""
        blocks = range(self._blocks_removed, self._count // _BLOCK)
        for newest in reversed(blocks):
            readers = self._key_value_store.add(self._key("read", newest), 0, self._timeout_seconds)
            if readers < self._job.comm.world_size - 1:
                continue
            # Ranks read in order: all of them have read every earlier block too.
            for block in range(self._blocks_removed, newest + 1):
                numbers = range(block * _BLOCK, (block + 1) * _BLOCK)
                self._key_value_store.delete(
                    [*(self._key("told", number) for number in numbers), self._key("read", block)]
                )
            self._blocks_removed = newest + 1
            return

    def _key(self, *parts: object) -> str:
        return self._job.key("schedule", self._generation, *parts)
