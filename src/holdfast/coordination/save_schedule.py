"""The schedule of a run: every rank decides alike whether a step is saved, without a collective."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.coordination.announcements import Announcements
from holdfast.coordination.job import Job
from holdfast.coordination.save_due import Announcement, Standing, is_due, needs_announcements
from holdfast.policies import OnRequest, SavePolicy, rules_of

_EVENTS_MAX = 1 << 16
"""What a rank that cannot hear rank 0 remembers of its loop, to go through it again once it can."""


@dataclass(frozen=True, slots=True)
class _Event:
    kind: Literal["asked", "saved", "loaded"]
    step: int


class Schedule:
    """Whether the steps of a run are to be saved, on one rank.

    What the loop does is gone through in order, each step by the announcement that is for it. A rank that cannot hear
    rank 0 goes by the step alone meanwhile, and goes through what it did once it can: from then on it stands where the
    others do, whatever each of them has missed.
    """

    def __init__(self, job: Job, policy: SavePolicy) -> None:
        self._policy = policy
        self._announcements = Announcements(job) if needs_announcements(policy) else None
        self.takes_requests = any(isinstance(rule, OnRequest) for rule in rules_of(policy))
        """Whether a request has any effect."""
        # A plain flag: whoever sets it may be a signal handler, and must not wait for a lock.
        self._is_asked = False
        self._asked_at: int | None = None
        self._step: int | None = None
        self._noted: int | None = None
        self._standing = Standing()
        self._events: deque[_Event] = deque(maxlen=_EVENTS_MAX)

    def request(self) -> None:
        """Ask for a save; from any thread, or from a signal handler."""
        self._is_asked = True

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be saved: the same on every rank that was asked about the same steps."""
        if self._step is not None and step < self._step:
            self._go_back(step)
        self._step = step
        if self._announcements is not None:
            if self._is_asked:
                self._is_asked = False
                self._asked_at = step
                self._announcements.ask(step)
            self._announcements.announce(step, self._standing)
        answer = self._gone_through(_Event("asked", step))
        if step == self._noted:
            return False
        if answer is None:
            # Nobody can say what time it is: what depends on the step alone is decided all the same.
            return is_due(self._policy, step, Announcement(step, -math.inf), Standing(self._noted))
        return answer

    def note_saved(self, step: int) -> None:
        """Take note that a save of a step begins; on every rank at the same point of its loop."""
        self._noted = step
        self._gone_through(_Event("saved", step))

    def note_loaded(self, step: int) -> None:
        """Take note that a step was loaded; on every rank at the same point of its loop."""
        self._noted = step
        self._gone_through(_Event("loaded", step))

    def _gone_through(self, event: _Event) -> bool | None:
        """Go through what the loop did, up to an event; return what comes of that, None if it cannot be known yet."""
        self._events.append(event)
        answer: bool | None = None
        while self._events:
            answer = self._outcome(self._events[0])
            if answer is None:
                return None
            self._events.popleft()
        return answer

    def _outcome(self, event: _Event) -> bool | None:
        if event.kind != "asked":
            self._stand_at(event)
            return False
        told = Announcement(event.step, -math.inf)
        if self._announcements is not None:
            before = self._announcements.in_force
            heard = self._announcements.heard(event.step)
            if heard is None:
                return None
            told = heard
            if before is None and heard.standing is not None:
                self._standing = heard.standing
            if self._standing.seconds is None:
                self._standing = replace(self._standing, seconds=told.seconds)
        if event.step == self._standing.step or not is_due(self._policy, event.step, told, self._standing):
            return False
        # It is saved now, or was by those who knew then.
        self._stand_at(_Event("saved", event.step))
        return True

    def _stand_at(self, event: _Event) -> None:
        told = None if self._announcements is None else self._announcements.in_force
        seconds = told.seconds if told is not None and event.kind == "saved" else self._standing.seconds
        self._standing = Standing(event.step, seconds)

    def _go_back(self, step: int) -> None:
        """Begin again, for the loop went back to an earlier step: what was announced is of later ones."""
        if self._events:
            self._events.clear()
            self._standing = replace(self._standing, step=self._noted)
        saved = self._standing.step
        if self._asked_at is not None and (saved is None or saved < self._asked_at):
            self._is_asked = True
        self._asked_at = None
        if saved is not None and saved > step:
            self._standing = replace(self._standing, step=None)
        if self._noted is not None and self._noted > step:
            self._noted = None
        if self._announcements is not None:
            self._announcements.restart()
