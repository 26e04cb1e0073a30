"""What rank 0 tells every rank of time and requests, ahead of the steps that it is for.

Each announcement has a key of its own on the board and is for the steps after the one before it. A rank reads one where
its steps come past the last it has read: it waits only where it is further ahead of rank 0 than was announced, and
rank 0 never waits. So nobody waits for a rank that waits for it, and all decide by the same words, however far apart
they are. About once a second one key is set and read.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import asdict

from holdfast.errors import CheckpointError
from holdfast.manager.job import Job
from holdfast.plan.schedule import next_until
from holdfast.spec.schedule import Announcement

logger = logging.getLogger(__name__)

_BLOCK = 64
"""Announcements that every rank acknowledges together, so that they can be forgotten."""

_ASK_SECONDS = 10.0
"""How long rank 0 waits for the step of a request that is counted already."""


class Announcements:
    """The announcements of a run, on one rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generation = -1
        self.in_force: Announcement | None = None
        """What holds for the step last asked about, or for the last one that was heard of."""
        self._is_patient = True
        self.restart()

    def restart(self) -> None:
        """Begin again, as every rank does whose steps go back; what is in force stays until something is heard."""
        self._generation += 1
        self._count = 0
        self._ahead: deque[Announcement] = deque()
        self._until: int | None = None
        self._requested: int | None = None
        self._asks_read = 0
        self._blocks_forgotten = 0
        self._last: tuple[int, float] | None = None
        self._strides: deque[int] = deque(maxlen=8)
        self._call_seconds: deque[float] = deque(maxlen=8)
        self._is_stale = True

    def ask(self, step: int) -> None:
        """Tell rank 0 that a save is wanted, of `step` or one soon after it."""
        job = self._job
        if job.comm.rank == 0:
            self._requested = max(step, self._requested or 0)
            return
        try:
            number = job.board.add(self._key("asks"), 1, job.settings.commit_timeout_seconds)
            job.board.set(self._key("ask", number), str(step).encode(), job.settings.commit_timeout_seconds)
        except (CheckpointError, TimeoutError) as error:
            logger.warning("the save that was asked for cannot be announced: %s", error)

    def heard(self, step: int) -> Announcement | None:
        """Return what is in force at a step; None where nothing was ever heard.

        Where rank 0 cannot be heard, what was in force before stays: a failure of the board never ends training.
        """
        try:
            if self._job.comm.rank == 0:
                self._announce(step)
            while self._is_stale or self.in_force is None or self.in_force.until < step:
                self.in_force = self._ahead.popleft() if self._job.comm.rank == 0 else self._read()
                self._is_stale = False
            self._is_patient = True
        except (CheckpointError, TimeoutError) as error:
            if self._is_patient:
                logger.warning(
                    "step %d: rank 0 cannot be heard, so that time and requests do not count for now: %s", step, error
                )
            # Each step would wait as long again.
            self._is_patient = False
        return self.in_force

    def _read(self) -> Announcement:
        """Return the announcement that follows, once rank 0 has made it."""
        job = self._job
        key = self._key("told", self._count)
        if not self._is_patient and not job.board.present(key):
            raise TimeoutError(f"{key}: still not set")
        (data,) = job.board.get_many([key], job.settings.commit_timeout_seconds)
        self._count += 1
        if self._count % _BLOCK == 0:
            block = self._count // _BLOCK - 1
            job.board.add(self._key("read", block), 1, job.settings.commit_timeout_seconds)
        return Announcement(**json.loads(data))

    def _announce(self, step: int) -> None:
        """Make the next announcement, on rank 0, if the steps that were told of end soon."""
        now = self._job.clock.monotonic_seconds()
        if self._job.comm.world_size == 1:
            # Nobody has to be told ahead: what is known now counts now.
            self._ahead.append(Announcement(step, now, self._requested))
            self._is_stale = True
            return
        if self._last is not None and step > self._last[0]:
            self._strides.append(step - self._last[0])
            self._call_seconds.append(now - self._last[1])
        self._last = step, now
        until = next_until(step, self._until, self._strides, self._call_seconds)
        if until is not None:
            self._read_asks()
            self._publish(Announcement(until, now, self._requested))

    def _publish(self, told: Announcement) -> None:
        job = self._job
        key, value = self._key("told", self._count), json.dumps(asdict(told)).encode()
        job.board.set(key, value, job.settings.commit_timeout_seconds)
        self._count += 1
        self._until = told.until
        self._ahead.append(told)
        if self._count % _BLOCK == 0:
            self._forget()

    def _read_asks(self) -> None:
        job = self._job
        total = job.board.add(self._key("asks"), 0, job.settings.commit_timeout_seconds)
        if total == self._asks_read:
            return
        keys = [self._key("ask", number) for number in range(self._asks_read + 1, total + 1)]
        steps = [int(each) for each in job.board.get_many(keys, _ASK_SECONDS)]
        self._asks_read = total
        self._requested = max(*steps, self._requested or 0)
        job.board.delete(keys)

    def _forget(self) -> None:
        """Remove announcements that every rank has read, so that the board stays small."""
        job = self._job
        while self._blocks_forgotten < self._count // _BLOCK:
            block = self._blocks_forgotten
            acknowledged = self._key("read", block)
            if job.board.add(acknowledged, 0, job.settings.commit_timeout_seconds) < job.comm.world_size - 1:
                return
            first = block * _BLOCK
            keys = [self._key("told", number) for number in range(first, first + _BLOCK)]
            job.board.delete([*keys, acknowledged])
            self._blocks_forgotten += 1

    def _key(self, *parts: object) -> str:
        return self._job.key("schedule", self._generation, *parts)
