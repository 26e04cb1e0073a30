"""The schedule of a run: every rank decides equally whether a step is saved, without a collective.

A rank records what its loop does as events: `decide` a step, a step was `saved`, a step was `loaded`. It replays the
events in order, each with the announcement that covers its step. The states of a rank:

    current    The queue of events is empty. Decisions follow the whole policy.
    behind     An announcement cannot be read. Events wait in the queue; decisions follow the rules by step alone.

    current -> behind    an event whose announcement cannot be read
    behind -> current    a later event: the announcement can be read, and all queued events are replayed

After the replay a rank knows the same last save as all other ranks, whatever each of them missed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.errors import InvalidError
from holdfast.policies import OnRequest, SavePolicy, rules_of
from holdfast.training.coordination.announcements import Announcements
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_due import Announcement, LastSave, is_due, needs_announcements

_EVENTS_MAX = 1 << 16
"""Events that a rank keeps while it is behind. The oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class _Event:
    kind: Literal["decide", "saved", "loaded"]
    step: int


def taking_requests(schedule: Schedule | None, name: str) -> Schedule:
    """Return the schedule of a policy that takes requests.

    Args:
        schedule: The schedule; None without a policy.
        name: The call that needs requests, for the message.
    Raises:
        InvalidError: The policy takes no requests.
    """
    if schedule is None or not schedule.takes_requests:
        raise InvalidError(
            f"{name}: the policy takes no requests, so no rank would save; expected a manager made with every=… or "
            "save=AnyOf(…, OnRequest())"
        )
    return schedule


class Schedule:
    """Decides on one rank which steps of a run are saved."""

    def __init__(self, job: Job, policy: SavePolicy, name: str = "schedule") -> None:
        self._policy = policy
        self._announcements = Announcements(job, name) if needs_announcements(policy) else None
        self.takes_requests = any(isinstance(rule, OnRequest) for rule in rules_of(policy))
        """Whether a request has any effect."""
        # A plain flag, no lock: a signal handler may set it while this thread holds any lock.
        self._is_requested = False
        self._requested_at: int | None = None
        self._current_step: int | None = None
        # The last step saved or loaded by this loop, known at once; `_last_save` may be behind it.
        self._last_step: int | None = None
        self._last_save = LastSave()
        self._events: deque[_Event] = deque(maxlen=_EVENTS_MAX)
        self._is_replaying = False

    def request(self) -> None:
        """Request a save; from any thread, or from a signal handler."""
        self._is_requested = True

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be saved: equal on every rank that asked about the same steps."""
        if self._current_step is not None and step < self._current_step:
            self._go_back(step)
        self._current_step = step
        if self._announcements is not None:
            if self._is_requested:
                self._is_requested = False
                self._requested_at = step
                self._announcements.request(step)
            self._announcements.announce(step, self._last_save)
        is_saved = self._decide(step)
        if self._announcements is not None and not is_saved:
            self._announcements.read_ahead(step)
        return is_saved

    def _decide(self, step: int) -> bool:
        decision = self._replay(_Event("decide", step))
        if step == self._last_step:
            return False
        if decision is None:
            # Time and requests are unknown: an announcement without either leaves the decision to the rules by step.
            return is_due(self._policy, step, Announcement(step, -math.inf), LastSave(self._last_step))
        return decision

    def note_saved(self, step: int) -> None:
        """Record that a save of a step begins. Call it on every rank at the same point of the loop."""
        self._last_step = step
        self._replay(_Event("saved", step))

    def note_loaded(self, step: int) -> None:
        """Record that a step was loaded. Call it on every rank at the same point of the loop."""
        self._last_step = step
        self._replay(_Event("loaded", step))

    def _replay(self, event: _Event) -> bool | None:
        """Queue an event, then handle queued events in order; return the decision for it, None if still behind."""
        self._events.append(event)
        if self._is_replaying:  # A signal handler saves. The call that it has interrupted handles this event too.
            return None
        self._is_replaying = True
        try:
            decision: bool | None = None
            while self._events:
                first = self._events[0]
                answer = self._handle(first)
                if answer is None:
                    return None
                self._events.popleft()
                # A signal handler may have queued an event of its own behind this one.
                decision = answer if first is event else decision
            return decision
        finally:
            self._is_replaying = False

    def _handle(self, event: _Event) -> bool | None:
        if event.kind != "decide":
            self._record(event)
            return False
        announcement = Announcement(event.step, -math.inf)
        if self._announcements is not None:
            is_first = self._announcements.in_force is None
            read = self._announcements.announcement_for(event.step)
            if read is None:
                return None
            announcement = read
            if is_first and read.last_save is not None:
                self._last_save = read.last_save
            if self._last_save.seconds is None:
                self._last_save = replace(self._last_save, seconds=read.seconds)
        if event.step == self._last_save.step or not is_due(self._policy, event.step, announcement, self._last_save):
            return False
        # A rank that is not behind saves this step now. A rank that replays the event late only records that save.
        self._record(_Event("saved", event.step))
        return True

    def _record(self, event: _Event) -> None:
        announcement = None if self._announcements is None else self._announcements.in_force
        seconds = self._last_save.seconds
        if announcement is not None and event.kind == "saved":
            seconds = announcement.seconds
        self._last_save = LastSave(event.step, seconds)

    def _go_back(self, step: int) -> None:
        """Begin again after the loop went back to an earlier step: all announcements cover later steps."""
        if self._events:
            # What was queued can no longer be decided; start from what this rank knows by itself.
            self._events.clear()
            self._last_save = replace(self._last_save, step=self._last_step)
        saved = self._last_save.step
        # A request that no save has fulfilled yet counts again: its announcement goes with the old generation.
        if self._requested_at is not None and (saved is None or saved < self._requested_at):
            self._is_requested = True
        self._requested_at = None
        # A save of a later step must not suppress the save of this one.
        if saved is not None and saved > step:
            self._last_save = replace(self._last_save, step=None)
        if self._last_step is not None and self._last_step > step:
            self._last_step = None
        if self._announcements is not None:
            self._announcements.restart()
