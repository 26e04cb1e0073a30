"""A save under way: three moments to wait for, and what came of it."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Literal

from holdfast.errors import CheckpointError, InvalidError
from holdfast.types.reports import SaveReport

logger = logging.getLogger(__name__)

Moment = Literal["staged", "replicated", "committed"]


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
        self._name = name
        self._lock = threading.Lock()
        self._waiting = int(awaited)
        self._awaited = False
        self.settle: Callable[[float | None], float | None] | None = None
        """Called before the thread that saved waits for `staged`, with the seconds it will wait; returns what is left
        of them. Where the state is taken lazily, it is then known at once that nothing more is read."""
        self.abandon: Callable[[CheckpointError], None] | None = None
        """Ends the save on every rank with an error, unless somebody may be publishing it. None where there is nothing
        to end."""
        self._saver = threading.get_ident()
        self.may_come = False
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
            settle = self.settle
            if moment == "staged" and settle is not None and threading.get_ident() == self._saver:
                left = settle(timeout)
            result = future.result(left)
        except TimeoutError:
            if not future.done():
                raise TimeoutError(f"{self._name}: not {moment} within {timeout} s; the save goes on") from None
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

    def reach_staged(self) -> None:
        """Mark the save as staged, unless it has failed."""
        self.settle = None
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def reach_committed(self, report: SaveReport) -> None:
        """Mark the save as committed."""
        self.abandon = None
        self.replicated.set_result(None)
        self.committed.set_result(report)

    def fail(self, error: BaseException) -> None:
        """Mark the save as failed; say so once if nobody is waiting to hear it."""
        with self._lock:
            if not self._waiting:
                logger.error("%s failed: %s: %s", self._name, type(error).__name__, error)
        self.settle = self.abandon = None
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
