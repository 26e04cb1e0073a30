"""A save under way: three moments to wait for, and what came of it."""

from __future__ import annotations

import logging
import threading
import traceback
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Literal, Protocol

from holdfast.errors import CheckpointError, InvalidError
from holdfast.types.reports import SaveReport

logger = logging.getLogger(__name__)

Moment = Literal["staged", "replicated", "committed"]


class InFlight(Protocol):
    """A save that ranks agreed on and that is not over."""

    def settle(self, timeout: float | None) -> float | None:
        """Wait, on the thread that saved, until the state is no longer read; return the seconds left of the timeout."""
        ...

    def abandon(self, error: CheckpointError) -> None:
        """End the save on every rank with an error, unless a rank may be publishing it."""
        ...


class SaveHandle:
    """A save under way.

    `staged`: training may change the state. `replicated`: it survives a lost node (with no peer tier, the same
    as committed). `committed`: it is durable and visible; its result is the `SaveReport`.
    A failure sets all moments not yet reached.
    """

    def __init__(self, name: str, *, awaited: bool = False) -> None:
        """Begin.

        Args:
            name: What is being saved, for messages.
            awaited: Whether the caller waits whatever comes, so that a failure need not be logged.
        """
        self.name = name
        """What is being saved, for messages."""
        self._lock = threading.Lock()
        self._waiting = int(awaited)
        self._awaited = False
        self.in_flight: InFlight | None = None
        """The unfinished save: what may still be settled or abandoned. None before the ranks agreed, and once over."""
        self._saver = threading.get_ident()
        self.may_be_committed = False
        """Whether it failed and may be committed, or come to be, all the same."""
        self.staged: Future[None] = Future()
        self.replicated: Future[None] = Future()
        self.committed: Future[SaveReport] = Future()
        for future in (self.staged, self.replicated, self.committed):
            # A save cannot be cancelled from outside, and a future that could be would be by asyncio's timeouts.
            future.set_running_or_notify_cancel()

    def wait(self, moment: Moment = "committed", timeout: float | None = None) -> SaveReport | None:
        """Wait for a moment; return the report once committed, None for an earlier moment.

        Args:
            moment: `staged`, `replicated` or `committed`.
            timeout: Seconds to wait at most; None for no limit.
        Raises:
            TimeoutError: The moment did not come in time; the save goes on.
            CheckpointError: The save failed.
            InvalidError: No such moment.
        """
        if moment not in ("staged", "replicated", "committed"):
            raise InvalidError(f"moment={moment!r}; expected staged, replicated or committed")
        with self._lock:
            self._waiting += 1
        future: Future[None] | Future[SaveReport] = getattr(self, moment)
        left = timeout
        try:
            in_flight = self.in_flight
            is_saver = threading.get_ident() == self._saver
            if moment == "staged" and in_flight is not None and is_saver and not self.staged.done():
                # A lazy save is known to be staged only once this thread has checked that the state did not change.
                left = in_flight.settle(timeout)
            result = future.result(left)
        except TimeoutError:
            if not future.done():
                raise TimeoutError(f"{self.name}: not {moment} within {timeout} s; the save goes on") from None
            raise
        finally:
            with self._lock:
                self._waiting -= 1
                self._awaited |= future.done() and future.exception() is not None
        return result

    @property
    def failure(self) -> BaseException | None:
        """What the save failed with, or None while it runs or once it is committed."""
        return self.committed.exception() if self.committed.done() else None

    @property
    def was_awaited(self) -> bool:
        """Whether somebody has seen the failure."""
        return self._awaited

    def abandon(self, error: CheckpointError) -> None:
        """End the save on every rank with an error, unless a rank may be publishing it or it is over."""
        in_flight = self.in_flight
        if in_flight is not None:
            in_flight.abandon(error)

    def reach_staged(self) -> None:
        """Mark the save as staged, unless it has failed."""
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def reach_committed(self, report: SaveReport) -> None:
        """Mark the save as committed."""
        self.in_flight = None
        self.replicated.set_result(None)
        self.committed.set_result(report)

    def fail(self, error: BaseException) -> None:
        """Mark the save as failed; say so once if nobody is waiting to hear it."""
        with self._lock:
            if not self._waiting:
                logger.error("%s failed: %s: %s", self.name, type(error).__name__, error)
        self.in_flight = None
        for future in (self.staged, self.replicated, self.committed):
            with suppress(InvalidStateError):
                future.set_exception(error)
        # Its frames hold the state, and whoever asks may come late or never.
        _forget_locals(error)


def _forget_locals(error: BaseException) -> None:
    """Clear the frames of an error and of what it came from; their lines stay."""
    known: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in known:
            continue
        known.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
