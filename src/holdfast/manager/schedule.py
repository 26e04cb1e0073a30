"""The schedule of a run: every rank decides alike whether a step is saved, without a collective."""

from __future__ import annotations

import math
from dataclasses import replace

from holdfast.manager.announcements import Announcements
from holdfast.manager.job import Job
from holdfast.plan.schedule import is_due, needs_announcements
from holdfast.spec.policy import OnRequest, SavePolicy, rules_of
from holdfast.spec.schedule import Announcement, Standing


class Schedule:
    """Whether the steps of a run are to be saved, on one rank."""

    def __init__(self, job: Job, policy: SavePolicy) -> None:
        self._policy = policy
        self._announcements = Announcements(job) if needs_announcements(policy) else None
        self.takes_requests = any(isinstance(rule, OnRequest) for rule in rules_of(policy))
        """Whether a request has any effect."""
        # A plain flag: whoever sets it may be a signal handler, and must not wait for a lock.
        self._is_asked = False
        self._asked_at: int | None = None
        self._step: int | None = None
        self._standing = Standing()

    def request(self) -> None:
        """Ask for a save; from any thread, or from a signal handler."""
        self._is_asked = True

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be saved: the same on every rank that was asked about the same steps."""
        if step == self._standing.step:
            return False
        if self._step is not None and step < self._step:
            self._go_back(step)
        self._step = step
        told = self._told(step)
        if told is None:
            # Nobody can say what time it is: what depends on the step alone is decided all the same.
            told = Announcement(step, -math.inf)
        elif self._standing.seconds is None:
            self._standing = replace(self._standing, seconds=told.seconds)
        return is_due(self._policy, step, told, self._standing)

    def note_saved(self, step: int) -> None:
        """Take note that a save of a step begins; on every rank at the same point of its loop."""
        told = None if self._announcements is None else self._announcements.in_force
        self._standing = Standing(step, self._standing.seconds if told is None else told.seconds)

    def note_loaded(self, step: int) -> None:
        """Take note that a step was loaded; on every rank at the same point of its loop."""
        self._standing = replace(self._standing, step=step)

    def _told(self, step: int) -> Announcement | None:
        if self._announcements is None:
            return None
        if self._is_asked:
            self._is_asked = False
            self._asked_at = step
            self._announcements.ask(step)
        return self._announcements.heard(step)

    def _go_back(self, step: int) -> None:
        """Begin again, for the loop went back to an earlier step: what was announced is of later ones."""
        saved = self._standing.step
        if self._asked_at is not None and (saved is None or saved < self._asked_at):
            self._is_asked = True
        self._asked_at = None
        if saved is not None and saved > step:
            self._standing = replace(self._standing, step=None)
        if self._announcements is not None:
            self._announcements.restart()
