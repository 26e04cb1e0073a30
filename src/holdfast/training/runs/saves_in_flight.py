"""The saves of one manager that nobody has awaited yet, and the errors of those that failed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.background import SLICE_SECONDS, WriteProgress
from holdfast.errors import CheckpointError, UnavailableError
from holdfast.training.runs.claim_step import RunFacts
from holdfast.training.runs.removal.background_collection import Background, lacks_room
from holdfast.training.runs.removal.pins import Pins, StepPin
from holdfast.training.saving.handle import SaveHandle

_FAILURES_HALF = 100
"""How many of the first failed saves that nobody awaits, and of the last, are kept for `wait`. The log has all."""


class SavesInFlight:
    """Remembers the saves of a manager until they are committed, or their error was raised."""

    def __init__(self, progress: WriteProgress) -> None:
        """Begin without saves.

        Args:
            progress: Tells which write hangs.
        """
        self._progress = progress
        self._handles: list[SaveHandle] = []
        self._forgotten = 0
        """Failed saves since the last `wait` whose handles are not kept."""

    def add(self, handle: SaveHandle) -> None:
        """Remember one more save."""
        self._handles.append(handle)
        self._forget_ended()

    def wait(self, *, closing: bool) -> None:
        """Wait for every save; as `CheckpointManager.wait`.

        Args:
            closing: Whether not to wait for a save whose write hangs.
        """
        failures: list[Exception] = []
        waited = list(self._handles)
        for handle in waited:
            try:
                is_known = handle.was_awaited
                self._await(handle, closing=closing)
            except CheckpointError as error:
                if not is_known:
                    failures.append(error)
        self._forget(waited)
        count, self._forgotten = len(failures) + self._forgotten, 0
        if failures and count == 1:
            raise failures[0]
        if failures:
            others = f"; the errors of {count - len(failures)} of them are in the log only" * (count > len(failures))
            raise failures[0] from ExceptionGroup(f"{count} saves failed{others}", failures)

    def await_ends(self) -> None:
        """Wait until every save has ended, unless a write hangs. Failures are left for `wait` to raise."""
        handles = list(self._handles)
        for handle in handles:
            in_flight = handle.in_flight
            if in_flight is not None:
                with suppress(CheckpointError):
                    # A lazy save is staged only after this thread has checked that the state did not change.
                    in_flight.settle(None)
        for handle in handles:
            while not handle.near.done() and self._progress.hung is None:
                with suppress(TimeoutError):
                    handle.near.exception(SLICE_SECONDS)

    def _await(self, handle: SaveHandle, *, closing: bool) -> None:
        while True:
            try:
                handle.wait("near", SLICE_SECONDS)
                return
            except TimeoutError:
                hung = self._progress.hung if closing else None
            if hung is not None:
                handle.stop_waiting(UnavailableError(f"{handle.name}: the manager was closed while {hung}"))
                if not handle.near.done():
                    return  # A rank may be publishing it.

    def _forget_ended(self) -> None:
        """Forget all saves but those in flight, and failures that `wait` must raise: a run may save for months."""
        ended = [known for known in list(self._handles) if known.near.done()]
        failed = [known for known in ended if known.failure is not None and not known.was_awaited]
        forgotten = failed[_FAILURES_HALF:-_FAILURES_HALF]
        self._forgotten += len(forgotten)
        kept = set(failed).difference(forgotten)
        self._forget([known for known in ended if known not in kept])

    def _forget(self, handles: Sequence[SaveHandle]) -> None:
        """Forget some saves, one by one: a signal handler may add another meanwhile, or forget the same."""
        for handle in handles:
            with suppress(ValueError):
                self._handles.remove(handle)


def note_failed(
    facts: RunFacts,
    pins: Pins,
    collecting: Background | None,
    pin: StepPin,
    handle: SaveHandle,
    committed: Future[SaveReport],
) -> None:
    """Unpin the steps that a certainly failed save needed; request room if the save ran out of room.

    Holds no reference to the manager: the handle outlives the manager.
    """
    error = committed.exception()
    if handle.may_be_committed:
        pins.note_unknown(pin)
    elif error is not None:
        pins.unpin(pin, is_committed=False)
    if error is not None:
        facts.forget()
    if collecting is not None and error is not None and lacks_room(error):
        collecting.want_room()
