"""The handle of a save in progress: the moments to wait for, and the report or the failure."""

from __future__ import annotations

import logging
import threading
import traceback
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Literal, Protocol

from holdfast.base.clock import SystemClock
from holdfast.base.interrupts import UnlockedFuture
from holdfast.base.types.reports import SaveReport
from holdfast.errors import CheckpointError, ConflictError, InvalidError, UnavailableError, translated
from holdfast.training.coordination.job import SaveHistory

logger = logging.getLogger(__name__)

Moment = Literal["staged", "near", "replicated", "committed"]
_MOMENTS = ("staged", "near", "replicated", "committed")


class InFlight(Protocol):
    """A save that the ranks agreed on and that has not ended."""

    def settle(self, timeout: float | None) -> float | None:
        """Wait, on the thread that saved, until the state is no longer read; return the seconds left of the timeout."""
        ...

    def cancel(self, error: CheckpointError) -> bool:
        """End the save on every rank with an error; return False if a rank may be publishing."""
        ...

    def stop_waiting(self, error: CheckpointError) -> None:
        """End the save as `cancel`, and fail the handle at once: the commit thread may hang for ever."""
        ...


class SaveHandle:
    """A save in progress.

    `staged`: training may change the state. `near`: the checkpoint is visible in the place to which the save writes,
    which is the near tier if there is one. `replicated`: in a near tier of peers, the loss of a node no longer loses
    the step; elsewhere the same as committed. `committed`: the checkpoint is durable and visible in the root; the
    result is the `SaveReport`. A failure ends every moment not yet reached.
    """

    def __init__(
        self,
        name: str,
        *,
        awaited: bool = False,
        history: SaveHistory | None = None,
        near_only: bool = False,
        replicates: bool = False,
    ) -> None:
        """Start with no moment reached.

        Args:
            name: Name of the save, for messages.
            awaited: Whether the caller waits for the commit in any case, so that a failure need not be logged.
            history: Counts the failures in a row; None: a history of this save alone.
            near_only: Whether the step stays in the near tier: then the last moment is `near`, or `replicated`.
            replicates: Whether the nodes of the near tier protect each other.
        """
        self._last: Moment = "committed" if not near_only else "replicated" if replicates else "near"
        self._replicates = replicates
        self.name = name
        """Name of the save, for messages."""
        self._history = history or SaveHistory(SystemClock())
        # A list, whose operations are atomic: a signal handler may interrupt `wait`, and save.
        self._waiting = [None] * int(awaited)
        self.was_awaited = False
        """Whether a `wait` has raised the failure."""
        self.in_flight: InFlight | None = None
        """The unfinished save, to settle or cancel. None before the ranks agreed, and after the end."""
        self.attempt = ""
        """Id of the attempt; empty before the ranks agreed."""
        self._saver = threading.get_ident()
        self.may_be_committed = False
        """Whether the save failed here although the checkpoint may exist, or appear later."""
        self.staged: Future[None] = UnlockedFuture()
        self.near: Future[SaveReport] = UnlockedFuture()
        self.replicated: Future[None] = UnlockedFuture()
        self.committed: Future[SaveReport] = UnlockedFuture()

    def wait(self, moment: Moment | None = None, timeout: float | None = None) -> SaveReport | None:
        """Wait for a moment; return the report of a moment at which the step is visible, else None.

        Args:
            moment: `staged`, `near`, `replicated` or `committed`; None for the last one that the save reaches.
            timeout: Seconds to wait at most; None for no limit.
        Raises:
            TimeoutError: The save did not reach the moment in time; the save goes on.
            CheckpointError: The save failed, or the root does not get the step.
            InvalidError: `moment` is not one of the names, or the save never reaches that moment.
        """
        moment = self._last if moment is None else moment
        if moment not in _MOMENTS:
            raise InvalidError(f"moment={moment!r}; expected staged, near, replicated or committed")
        if _MOMENTS.index(moment) > _MOMENTS.index(self._last):
            raise self._never(moment)
        self._waiting.append(None)
        future: Future[None] | Future[SaveReport] = getattr(self, moment)
        left = timeout
        try:
            in_flight = self.in_flight
            is_saver = threading.get_ident() == self._saver
            if moment == "staged" and in_flight is not None and is_saver and not self.staged.done():
                # A lazy save is staged only after this thread has checked that the state did not change.
                left = in_flight.settle(timeout)
            with suppress(TimeoutError):
                future.result(left)
            if not future.done():
                raise TimeoutError(f"{self.name}: not {moment} within {timeout} s; the save goes on")
            # The save may have ended after the timeout: the failure must not be lost.
            result = future.result()
        finally:
            self._waiting.pop()
            self.was_awaited |= future.done() and future.exception() is not None
        return result

    def _never(self, moment: str) -> InvalidError:
        return InvalidError(
            f"{self.name}: moment={moment!r}, and the step stays in the near tier, since neither every=… nor save() "
            f"made the step due at the root; expected wait({self._last!r}). To have the root get the step, tag it"
        )

    @property
    def failure(self) -> BaseException | None:
        """The error of a failed save; None during the save and after the commit."""
        return self.near.exception() if self.near.done() else None

    def cancel(self, reason: str) -> bool:
        """End the save on every rank with a `ConflictError`, and leave nothing on storage; any one rank may call it.

        Waits for the job's key-value store only: the handle of each rank fails once its rank has stopped writing and
        has removed its files. A cancelled save counts as a failed one (`Settings.failed_saves_max`).

        Args:
            reason: Why, for the error of every rank.
        Returns:
            False if the save has ended, or a rank may be publishing: then the save ends by itself.
        """
        in_flight = self.in_flight
        if in_flight is None:
            return False
        return in_flight.cancel(ConflictError(f"{self.name}: cancelled: {reason}. Nothing was committed"))

    def stop_waiting(self, error: CheckpointError) -> None:
        """End the save although a write hangs: on every rank, and at once, unless a rank may be publishing."""
        in_flight = self.in_flight
        if in_flight is not None:
            in_flight.stop_waiting(error)

    def reach_staged(self) -> None:
        """Mark the save as staged, unless it has failed."""
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def reach_near(self, report: SaveReport) -> None:
        """Mark the step as visible where the save has written. The save has ended; the drain may follow."""
        self._history.note_committed()
        self.in_flight = None
        self.reach_staged()  # The training thread may be interrupted right before this call.
        self.near.set_result(report)
        if self._last != "committed":
            self.end_undrained(self._never("committed"))

    def reach_replicated(self) -> None:
        """Mark the step as safe from the loss of any one node."""
        with suppress(InvalidStateError):  # The root may have been faster.
            self.replicated.set_result(None)

    def end_unreplicated(self, error: CheckpointError) -> None:
        """Record why the nodes do not protect a step that is near."""
        with suppress(InvalidStateError):
            self.replicated.set_exception(error)

    def reach_committed(self, report: SaveReport) -> None:
        """Mark the step as visible in the root."""
        self.reach_staged()
        with suppress(InvalidStateError):  # The nodes may protect the step already.
            self.replicated.set_result(None)
        with suppress(InvalidStateError):  # The manager may have been closed meanwhile.
            self.committed.set_result(report)
        if not self.near.done():
            self.reach_near(report)  # Last: with this moment the save has ended.

    def end_undrained(self, error: CheckpointError) -> None:
        """Record why the root does not get a step that the near tier has."""
        if not self._replicates:
            self.end_unreplicated(error)
        with suppress(InvalidStateError):
            self.committed.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Mark the save as failed; log the error if no caller waits for the save."""
        if self.near.done():
            return  # The save was given up while a write hung, and the write has ended now.
        counted = self._history.note_failed()
        if not self._waiting:
            if isinstance(error.__cause__, Exception | None):
                logger.error("%s failed: %s: %s (%s)", self.name, type(error).__name__, error, counted)
            else:
                logger.warning("%s ended: %s", self.name, error)
        self.end_with(error)
        # The frames hold the state, and the caller may read the failure late or never.
        _clear_frames(error)

    def end_with(self, error: BaseException) -> None:
        """End each moment that was not reached, without a log line: the caller raises or has logged the error."""
        self.in_flight = None
        for future in (self.staged, self.near, self.replicated, self.committed):
            with suppress(InvalidStateError):
                future.set_exception(error)


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of an error and of its causes; the line numbers stay."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


def typed(error: BaseException, name: str) -> CheckpointError:
    """Return an error as one of ours, so that a handle never raises anything else."""
    return translated(error, f"{name}: ")


def collect_error(error: BaseException, name: str) -> BaseException:
    """Return the error with which every rank refuses a state that this rank could not collect."""
    if isinstance(error, CheckpointError) or not isinstance(error, Exception):
        return error
    what = ": ".join([*map(str, getattr(error, "__notes__", ())), f"{type(error).__name__}: {error}"])
    if isinstance(error, MemoryError | OSError) or type(error).__name__ == "OutOfMemoryError":
        # The state is valid, and training can continue: the next save may find enough memory.
        refusal: CheckpointError = UnavailableError(f"{name}: the state could not be collected now: {what}")
    else:
        refusal = InvalidError(f"{name}: the state could not be collected: {what}")
    # The handle keeps only the refusal: its cause shows which `state_dict` failed.
    refusal.__cause__ = error
    return refusal
