"""Garbage collection on a thread of its own, behind training.

Each mark waits for its own grace, so a step goes that long after its mark, however many other steps are marked.
States of the thread, and who moves it on:

    absent    -> working    `want` or `want_room`: the first commit, or a save that finds no room
    working   -> finishing  `close` that may wait: the thread looks once more, and ends after the grace of the last step
    working   -> stopped    `close` that may not wait: a grace is cut short
    finishing -> stopped    `close` waits no longer: a signal, Ctrl-C, a grace that is too long, or storage that hangs
    finishing, stopped -> ended   the thread has removed its marks

Marks of the thread: `pending` while their grace runs, `held back` if the removal after it failed. Those are tried again
at the next commit, and at the next save that finds no room.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.clock import Clock
from holdfast.base.interrupts import GUARD
from holdfast.errors import ConflictError, CorruptError, first_three, shown_bytes
from holdfast.training.runs.removal.garbage_collection import CheckpointGC, Marked

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0
"""Longest wait for storage while a run is closed, beside a grace. Storage may never answer."""

_GRACE_SECONDS_MAX = 60.0
"""Longest rest of a grace that a close waits for. A longer grace is left to the next job: a script should end."""

_SAID_AFTER_SECONDS = 1.0
"""A close that waits for longer says so."""

_POLL_SECONDS = 0.1
"""How often a close that waits looks whether it should wait no longer."""

_MARKS_PER_GRACE = 10
"""Most marks in their grace at once, while training. Each costs two inventories, and a small model may be saved at
every step."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A mark, and when its grace has run."""

    marked: Marked
    due: float


class Background:
    """Collects after each commit, on a thread, until the run is closed."""

    def __init__(
        self,
        collector: CheckpointGC,
        grace_seconds: float,
        clock: Clock,
        may_collect: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start no thread yet.

        Args:
            collector: Marks and removes.
            grace_seconds: How long marked steps stay.
            clock: Measures it.
            may_collect: Whether anything may go; asked at each request. If not, none is made, and a close never waits.
        """
        self._collector, self._grace_seconds, self._clock = collector, grace_seconds, clock
        self._may_collect = may_collect
        # Set under GUARD: a signal handler may save while the training thread sets one.
        self._wanted, self._stopped, self._finishing = threading.Event(), threading.Event(), threading.Event()
        self._lacks_room = threading.Event()  # As those.
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._release: Callable[[], None] = lambda: None
        # Written by the thread alone; a close reads them.
        self._pending: tuple[_Pending, ...] = ()
        self._held_back: tuple[_Pending, ...] = ()
        self._last_due = -math.inf
        """When the grace of the last marked step has run."""
        self._next_mark = math.inf
        """When to look for more to mark."""
        self._warned_steps: tuple[str, ...] | None = None

    def want(self) -> None:
        """Request a collection after a commit."""
        if self._may_collect():
            self._begin()

    def _begin(self) -> None:
        with GUARD:
            self._wanted.set()
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="holdfast-collect", daemon=True)
                self._thread.start()

    def want_room(self) -> None:
        """Request a collection after a save that found no room on the disk; warn of what can go, and when."""
        if self._collector.may_remove and self._may_collect():
            with GUARD:
                self._lacks_room.set()
            self._begin()

    def close(self, release: Callable[[], None], may_wait: Callable[[], bool] = lambda: False) -> None:
        """End the thread, then release the writer lease.

        Args:
            release: Releases the writer lease. If the thread is left behind, it does that itself at its end: nobody
                else may write while it removes files.
            may_wait: Whether to wait until every step that is due is removed; asked again and again. If not, a grace
                is cut short. Storage gets a few seconds in either case.
        """
        with GUARD:  # A save that has just failed may ask for room meanwhile.
            thread = self._thread
            if thread is None:
                self._stopped.set()
        if thread is None:
            release()
            return
        try:
            seconds_left = self._await_graces(thread, may_wait)
            self._stop()
            # A thread that a forked child inherits is not alive: there is nothing to wait for.
            thread.join(seconds_left)
        finally:
            # After Ctrl-C too: it ends the wait, not a removal.
            self._stop()
            with GUARD:
                is_left = not self._has_ended
                if is_left:
                    self._release = release
            if not is_left:
                release()
        if is_left and thread.is_alive():
            logger.warning(
                "%s: garbage collection did not end within %g s of the close. It goes on while this process "
                "lives, and then gives up the right to write here. The next collection removes what is left",
                self._collector.url,
                _END_SECONDS,
            )

    def _stop(self) -> None:
        with GUARD:
            self._stopped.set()
            self._wanted.set()

    def _await_graces(self, thread: threading.Thread, may_wait: Callable[[], bool]) -> float:
        """Wait until what is due is removed; return the seconds that storage has left to answer."""
        start, is_said = self._clock.monotonic_seconds(), False
        while thread.is_alive() and may_wait():
            if not self._finishing.is_set():
                with GUARD:
                    self._finishing.set()
                    self._wanted.set()
            now, due = self._clock.monotonic_seconds(), self._last_due
            if due - start > _GRACE_SECONDS_MAX:
                logger.info(
                    "%s: steps [%s] are left to the next job: their grace has %.0f s left, and close waits %g s at "
                    "most. See Settings.collect_grace_seconds",
                    self._collector.url,
                    first_three(self._steps_due()),
                    due - now,
                    _GRACE_SECONDS_MAX,
                )
                break
            seconds_left = max(due, start) + _END_SECONDS - now
            if seconds_left <= 0:
                return 0.0
            thread.join(min(seconds_left, _POLL_SECONDS))
            if not is_said and due > now and now - start >= _SAID_AFTER_SECONDS:
                is_said = True
                # A warning: a script that seems to hang at its end must say why, also without a configured log.
                logger.warning(
                    "%s: close waits up to %.0f s until steps [%s] are deleted: nothing keeps them, and their "
                    "grace runs (Settings.collect_grace_seconds=%g). Ctrl-C or close(wait=False) leaves them to "
                    "the next job",
                    self._collector.url,
                    math.ceil(due - now),
                    first_three(self._steps_due()),
                    self._grace_seconds,
                )
        return _END_SECONDS

    def _steps_due(self) -> tuple[str, ...]:
        names = {name for each in (*self._pending, *self._held_back) for name in each.marked.names}
        return tuple(sorted(names, key=lambda name: (int(name.partition("@")[0]), name)))

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with GUARD:
                self._has_ended = True
            self._release()

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                is_last = self._finishing.is_set()
                is_wanted = self._wanted.wait(self._idle_seconds())
                if self._stopped.is_set():
                    return
                if is_wanted:
                    self._wanted.clear()
                    self._note_wanted()
                self._mark_if_due()
                self._execute_due()
                if self._lacks_room.is_set():
                    self._lacks_room.clear()
                    self._warn_of_room()
                # After a look that began once the run was being closed.
                if is_last and not self._awaits_steps:
                    return
        except ConflictError as over:
            logger.warning("collecting ends: %s", over)
        finally:
            self._withdraw()

    @property
    def _awaits_steps(self) -> bool:
        return any(each.marked.steps for each in self._pending)

    def _idle_seconds(self) -> float | None:
        """Return how long there is nothing to do, unless something is wanted; None for no limit."""
        if self._finishing.is_set() and self._next_mark == math.inf and not self._awaits_steps:
            return 0.0
        next_act = min([self._next_mark, *(each.due for each in self._pending)])
        return None if next_act == math.inf else max(next_act - self._clock.monotonic_seconds(), 0.0)

    def _note_wanted(self) -> None:
        now = self._clock.monotonic_seconds()
        self._pending, self._held_back = (*self._pending, *self._held_back), ()
        newest_mark = max((each.due for each in self._pending), default=-math.inf) - self._grace_seconds
        is_hurried = self._finishing.is_set() or self._lacks_room.is_set()
        self._next_mark = now if is_hurried else max(now, newest_mark + self._grace_seconds / _MARKS_PER_GRACE)

    def _mark_if_due(self) -> None:
        if self._clock.monotonic_seconds() < self._next_mark:
            return
        self._next_mark = math.inf
        try:
            marked = self._collector.mark([each.marked for each in self._pending])
        except ConflictError:
            raise
        except Exception as error:  # noqa: BLE001 - the next commit tries again
            self._collector.warn_once("nothing was collected: %s: %s", type(error).__name__, error)
            return
        if marked.to_delete:
            due = self._clock.monotonic_seconds() + self._grace_seconds
            self._pending = (*self._pending, _Pending(marked, due))
            if marked.steps:
                self._last_due = due

    def _execute_due(self) -> None:
        now = self._clock.monotonic_seconds()
        due = tuple(each for each in self._pending if each.due <= now)
        if not due:
            return
        self._pending = tuple(each for each in self._pending if each not in due)
        try:
            report = self._collector.execute([each.marked for each in due])
        except ConflictError:
            raise
        except Exception as error:  # noqa: BLE001 - the next commit tries again
            self._collector.warn_once("nothing was collected: %s: %s", type(error).__name__, error)
            # A mark that contradicts what is stored is of no use any more.
            self._held_back = () if isinstance(error, CorruptError) else (*self._held_back, *due)
            return
        if report.steps or report.superseded or report.files:
            names = ", ".join(map(str, (*report.steps, *report.superseded)))
            logger.info("collected steps [%s]: %s freed", names, shown_bytes(report.bytes))

    def _warn_of_room(self) -> None:
        """Warn, after a save found no room, of the steps that go soon; once for the same steps."""
        steps = self._steps_due()
        if steps == self._warned_steps:
            return
        self._warned_steps = steps
        if not steps:
            logger.warning(
                "%s: the disk has no room for the next save, and every step is kept. Free space, or keep fewer steps",
                self._collector.url,
            )
            return
        first = min((each.due for each in self._pending if each.marked.steps), default=-math.inf)
        logger.warning(
            "%s: the disk has no room for the next save. Steps [%s] are deleted when their grace has run, the first in "
            "%.1f s; saves until then may fail. The guide says how much room a run needs (What to keep)",
            self._collector.url,
            first_three(steps),
            max(first - self._clock.monotonic_seconds(), 0.0),
        )

    def _withdraw(self) -> None:
        """Remove the marks that are left: what they list is left to the next job."""
        left = [each.marked for each in self._pending]
        if not left:
            return
        try:
            self._collector.remove_marks(left)
        except Exception as error:  # noqa: BLE001 - the next collection removes them
            self._collector.warn_once("marks are left: %s: %s", type(error).__name__, error)


def lacks_room(error: BaseException) -> bool:
    """Return whether a save failed because the disk or a quota is full, on this rank or another.

    Of an error on another rank only the text is known, and each names the system's error.
    """
    return any(name in str(error) for name in ("ENOSPC", "EDQUOT"))
