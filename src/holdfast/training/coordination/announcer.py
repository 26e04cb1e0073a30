"""Rank 0's part in announcements: it stores them, on a thread of its own, and never waits for another rank.

`announcements.py` says what an announcement is, and how every rank reads it. The states of rank 0's storing:

    idle       The announcements stored reach far enough ahead, or the last try failed.
    storing    A call on the other thread stores one. The training thread goes on, unless its step has none yet.

    idle -> storing    the training thread, in `announce()`
    storing -> idle    the other thread, at the end of its call. The training thread takes note of a failure at its next
                       step.

While a call stores, only the other thread reads and changes what `_Stored` holds, so `announce()` begins no second one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.core.engine.background import BackgroundQueue, wait_in_slices
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.message_codec import decode_message, encode_message
from holdfast.training.coordination.save_due import Announcement, LastSave, next_until

BLOCK = 64
"""Announcements that a rank counts as read together, so that their keys can be removed."""

LATE_SECONDS = 10.0
"""How much longer than a call may take the training thread waits for it."""

_REQUEST_SECONDS = 10.0
"""How long rank 0 waits for the step of a request that is already counted. After that it drops the request."""

_PAUSE_FACTOR = 9
"""After a failed try, rank 0 announces nothing for this many times the duration of the try.

A store that always times out then costs at most a tenth of the training time."""


@dataclass(slots=True)
class _Stored:
    """What rank 0 has stored so far, and what it knows of requests."""

    count: int = 0
    """Announcements stored."""

    until: int | None = None
    """Last step of the last one; None before the first one."""

    requested: int | None = None
    """The latest step at which a rank requested a save, as far as rank 0 knows."""

    requests_read: int = 0
    blocks_removed: int = 0

    ahead: deque[Announcement] = field(default_factory=deque)
    """Stored, and not in force on rank 0 yet. Both threads use it: the operations of a deque are atomic."""


class Announcer:
    """Stores the announcements of one generation, on rank 0."""

    def __init__(self, job: Job, key_of: Callable[..., str], calls: BackgroundQueue) -> None:
        """Store nothing yet.

        Args:
            job: The ranks.
            key_of: Returns a key of this generation.
            calls: The thread that makes the calls to the key-value store.
        """
        self._job, self._key_value_store, self._key_of, self._calls = job, job.key_value_store, key_of, calls
        self._timeout_seconds = job.agreement_seconds
        self._stored = _Stored()
        self._storing: Future[object] | None = None
        self._tried_seconds = 0.0
        self._paused_until = -math.inf
        self._requested: int | None = None
        self._last: tuple[int, float] | None = None
        self._strides: deque[int] = deque(maxlen=8)
        self._call_seconds: deque[float] = deque(maxlen=8)

    def request(self, step: int) -> None:
        """Announce a save of `step` or of one soon after it."""
        self._requested = max(step, self._requested or 0)

    def announce(self, step: int, last_save: LastSave) -> Exception | None:
        """Begin to store the next announcement if the steps covered so far end soon; return why the last try failed.

        Args:
            step: The current step.
            last_save: The last save.
        """
        now = self._job.clock.monotonic_seconds()
        if self._job.comm.world_size == 1:
            # No other rank: an announcement for this step alone needs no store.
            self._stored.ahead.append(Announcement(step, now, self._requested))
            return None
        if self._last is not None and step > self._last[0]:
            self._strides.append(step - self._last[0])
            self._call_seconds.append(now - self._last[1])
        self._last = step, now
        if self._storing is not None and not self._storing.done():
            return None
        failure = self._take_failure(now)
        # A forked child has no thread that stores, and announces nothing.
        if failure is not None or now < self._paused_until or self._job.is_inherited:
            return failure
        stored = self._stored
        until = next_until(step, stored.until, self._strides, self._call_seconds)
        if until is not None:
            first = last_save if stored.count == 0 else None
            store = partial(self._store, Announcement(until, now, self._requested, first))
            self._storing = self._calls.submit_short(store)
        return None

    def next(self) -> Announcement:
        """Return the next announcement; wait for the call that stores it, in slices, so that signals are heard.

        Other ranks may decide by it as soon as it is stored, so this rank must not decide without it.

        Raises:
            CheckpointError, TimeoutError: It could not be stored.
        """
        storing = self._storing
        if not self._stored.ahead and storing is not None and not self._job.is_inherited:
            # No longer, although a call may take twice that: other ranks may wait in a collective.
            wait_in_slices(storing, self._timeout_seconds + LATE_SECONDS, self._job.clock, lambda: None)
        with suppress(IndexError):
            return self._stored.ahead.popleft()
        raise UnavailableError("rank 0 has not stored its next announcement; expected one for each step")

    def _take_failure(self, now: float) -> Exception | None:
        """Return why the last try failed, if it did and this was not asked before; then pause."""
        failure = None if self._storing is None else self._storing.exception()
        self._storing = None
        if failure is None:
            return None
        self._paused_until = now + _PAUSE_FACTOR * self._tried_seconds
        if not isinstance(failure, CheckpointError | TimeoutError):
            raise failure
        return failure

    # ------------------------------------------------------------------------------------- on the other thread

    def _store(self, wanted: Announcement) -> None:
        clock = self._job.clock
        start = clock.monotonic_seconds()
        try:
            self._store_until(wanted)
        finally:
            self._tried_seconds = clock.monotonic_seconds() - start

    def _store_until(self, wanted: Announcement) -> None:
        """Store announcements up to the last step of a wanted one.

        An earlier try may have stored one although it seemed to fail. That one counts: a rank may have decided by it.
        """
        stored = self._stored
        while stored.until is None or stored.until < wanted.until:
            self._read_requests()
            requested = max((step for step in (wanted.requested, stored.requested) if step is not None), default=None)
            value = encode_message(replace(wanted, requested=requested))
            key = self._key_of("told", stored.count)
            found = decode_message(
                self._key_value_store.compare_set(key, b"", value, self._timeout_seconds), Announcement
            )
            stored.count += 1
            stored.until = found.until
            stored.ahead.append(found)
            wanted = replace(wanted, last_save=None)
            if stored.count % BLOCK == 0:
                with suppress(CheckpointError, TimeoutError):
                    self._remove_read()

    def _read_requests(self) -> None:
        stored = self._stored
        total = self._key_value_store.add(self._key_of("asks"), 0, self._timeout_seconds)
        if total == stored.requests_read:
            return
        keys = [self._key_of("ask", number) for number in range(stored.requests_read + 1, total + 1)]
        with suppress(TimeoutError):
            self._key_value_store.wait(keys, _REQUEST_SECONDS)
        # A rank that failed between count and step has logged it.
        keys = [key for key in keys if self._key_value_store.present(key)]
        steps = [int(data) for data in self._key_value_store.get_many(keys, _REQUEST_SECONDS)]
        stored.requests_read = total
        if steps:
            stored.requested = max(*steps, stored.requested or 0)
        self._key_value_store.delete(keys)

    def _remove_read(self) -> None:
        """Delete the keys of announcements that every rank has read, so that the key-value store stays small."""
        stored = self._stored
        blocks = range(stored.blocks_removed, stored.count // BLOCK)
        for newest in reversed(blocks):
            readers = self._key_value_store.add(self._key_of("read", newest), 0, self._timeout_seconds)
            if readers < self._job.comm.world_size - 1:
                continue
            # Ranks read in order: all of them have read every earlier block too.
            for block in range(stored.blocks_removed, newest + 1):
                numbers = range(block * BLOCK, (block + 1) * BLOCK)
                self._key_value_store.delete(
                    [*(self._key_of("told", number) for number in numbers), self._key_of("read", block)]
                )
            stored.blocks_removed = newest + 1
            return
