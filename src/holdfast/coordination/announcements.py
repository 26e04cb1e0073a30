"""What rank 0 tells every rank of time and requests, ahead of the steps that it is for.

Each announcement has a key of its own on the board and is for the steps after the one before it. A rank reads one where
its steps come past the last it has read: it waits only where it is further ahead of rank 0 than was announced, and
rank 0 never waits. So nobody waits for a rank that waits for it, and all decide by the same words, however far apart
they are. About once a second one key is set and read.

What counts is what stands on the board: every rank, rank 0 too, takes the announcements from there, all of them and one
after the other. Whoever could not is behind for a while, and never of another mind.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from contextlib import suppress
from dataclasses import asdict

from holdfast.coordination.job import Job
from holdfast.coordination.save_due import Announcement, Standing, next_until
from holdfast.errors import CheckpointError, UnavailableError

logger = logging.getLogger(__name__)

_BLOCK = 64
"""Announcements that every rank acknowledges together, so that they can be forgotten."""

_ASK_SECONDS = 10.0
"""How long rank 0 waits for the step of a request that is counted already; then it does without."""

_REST = 9
"""How many times as long as a failed try took rank 0 leaves the board alone: it must not hold training up for good."""


class Announcements:
    """The announcements of a run, on one rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generation = -1
        self._is_patient = True
        self.restart()

    def restart(self) -> None:
        """Begin again, as every rank does whose steps go back."""
        self._generation += 1
        self.in_force: Announcement | None = None
        """What holds for the step last asked about; None before one was heard of."""
        self._count = 0
        self._ahead: deque[Announcement] = deque()
        self._until: int | None = None
        self._requested: int | None = None
        self._asks_read = 0
        self._blocks_forgotten = 0
        self._last: tuple[int, float] | None = None
        self._strides: deque[int] = deque(maxlen=8)
        self._call_seconds: deque[float] = deque(maxlen=8)
        self._rests_until = -math.inf

    def ask(self, step: int) -> None:
        """Tell rank 0 that a save is wanted, of `step` or one soon after it."""
        job = self._job
        if job.comm.rank == 0:
            self._requested = max(step, self._requested or 0)
            return
        try:
            number = job.key_value_store.add(self._key("asks"), 1, job.settings.commit_timeout_seconds)
            job.key_value_store.set(self._key("ask", number), str(step).encode(), job.settings.commit_timeout_seconds)
        except (CheckpointError, TimeoutError) as error:
            logger.warning("the save that was asked for cannot be announced: %s", error)

    def announce(self, step: int, standing: Standing) -> None:
        """Make the next announcement, on rank 0, if the steps that were told of end soon.

        Args:
            step: The step that rank 0 has come to.
            standing: What it stands at.
        """
        now = self._job.clock.monotonic_seconds()
        if self._job.comm.rank != 0:
            return
        if self._job.comm.world_size == 1:
            # Nobody has to be told ahead: what is known now counts now.
            self._ahead.append(Announcement(step, now, self._requested))
            return
        if self._last is not None and step > self._last[0]:
            self._strides.append(step - self._last[0])
            self._call_seconds.append(now - self._last[1])
        self._last = step, now
        if now < self._rests_until:
            return
        try:
            while (until := next_until(step, self._until, self._strides, self._call_seconds)) is not None:
                self._read_asks()
                first = standing if self._count == 0 else None
                self._publish(Announcement(until, now, self._requested, first))
        except (CheckpointError, TimeoutError) as error:
            self._complain(step, error)
            after = self._job.clock.monotonic_seconds()
            self._rests_until = after + _REST * (after - now)

    def heard(self, step: int) -> Announcement | None:
        """Return what is in force at a step; None where rank 0 cannot be heard, which never ends training."""
        try:
            while self.in_force is None or self.in_force.until < step:
                self._take_next()
                self._is_patient = True
        except (CheckpointError, TimeoutError) as error:
            self._complain(step, error)
            return None
        return self.in_force

    def _complain(self, step: int, error: Exception) -> None:
        if self._is_patient:
            logger.warning(
                "step %d: rank 0 cannot be heard, so that time and requests do not count for now: %s", step, error
            )
        # Each step would wait as long again.
        self._is_patient = False

    def _take_next(self) -> None:
        """Have the announcement that follows be in force, once rank 0 has made it."""
        job = self._job
        if job.comm.rank == 0:
            if not self._ahead:
                raise UnavailableError("what follows could not be announced")
            self.in_force = self._ahead.popleft()
            return
        key = self._key("told", self._count)
        if not self._is_patient and not job.key_value_store.present(key):
            raise TimeoutError(f"{key}: still not set")
        (data,) = job.key_value_store.get_many([key], job.settings.commit_timeout_seconds)
        self.in_force = _read(data)
        self._count += 1
        if self._count % _BLOCK == 0:
            block = self._count // _BLOCK - 1
            # One that is not counted is made up for by the next.
            with suppress(CheckpointError, TimeoutError):
                job.key_value_store.add(self._key("read", block), 1, job.settings.commit_timeout_seconds)

    def _publish(self, told: Announcement) -> None:
        """Make an announcement, or keep to what an earlier try has made that seemed to fail."""
        job = self._job
        value = json.dumps(asdict(told)).encode()
        stands = job.key_value_store.compare_set(
            self._key("told", self._count), b"", value, job.settings.commit_timeout_seconds
        )
        told = _read(stands)
        self._count += 1
        self._until = told.until
        self._ahead.append(told)
        if self._count % _BLOCK == 0:
            with suppress(CheckpointError, TimeoutError):
                self._forget()

    def _read_asks(self) -> None:
        job = self._job
        total = job.key_value_store.add(self._key("asks"), 0, job.settings.commit_timeout_seconds)
        if total == self._asks_read:
            return
        keys = [self._key("ask", number) for number in range(self._asks_read + 1, total + 1)]
        with suppress(TimeoutError):
            job.key_value_store.wait(keys, _ASK_SECONDS)
        # Whoever failed between the count and the step has said so himself.
        keys = [key for key in keys if job.key_value_store.present(key)]
        steps = [int(each) for each in job.key_value_store.get_many(keys, _ASK_SECONDS)]
        self._asks_read = total
        if steps:
            self._requested = max(*steps, self._requested or 0)
        job.key_value_store.delete(keys)

    def _forget(self) -> None:
        """Remove announcements that every rank has read, so that the board stays small."""
        job = self._job
        blocks = range(self._blocks_forgotten, self._count // _BLOCK)
        for newest in reversed(blocks):
            read = job.key_value_store.add(self._key("read", newest), 0, job.settings.commit_timeout_seconds)
            if read < job.comm.world_size - 1:
                continue
            # Whoever has read these has read all before them.
            for block in range(self._blocks_forgotten, newest + 1):
                numbers = range(block * _BLOCK, (block + 1) * _BLOCK)
                job.key_value_store.delete(
                    [*(self._key("told", number) for number in numbers), self._key("read", block)]
                )
            self._blocks_forgotten = newest + 1
            return

    def _key(self, *parts: object) -> str:
        return self._job.key("schedule", self._generation, *parts)


def _read(data: bytes) -> Announcement:
    document = json.loads(data)
    standing = document.pop("standing")
    return Announcement(**document, standing=None if standing is None else Standing(**standing))
