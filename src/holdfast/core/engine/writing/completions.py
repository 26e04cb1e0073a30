"""Completes uploads beside the work on the next packs, and measures what is in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol, Self

from holdfast.core.engine.encoding.meter import SaveMeter
from holdfast.core.engine.parallel_map import CALLS_AT_ONCE, WorkerThreads

_UNMEASURED: AbstractContextManager[None] = nullcontext()


class Completable(Protocol):
    """What is left to do of an upload."""

    def complete(self, total_bytes: int | None = None) -> None:
        """Make the object durable and visible, as `Upload.complete`."""
        ...

    def abort(self) -> None:
        """Remove everything of it, as `Upload.abort`."""
        ...


class Completions:
    """Completes uploads to a store of objects on threads of its own, while the next packs are copied and hashed.

    There an upload sends its bytes only when it is complete, so one after the other would leave the connection idle
    while a pack is filled, and fill none of several. The memory of the uploads under way bounds their number: a store
    lends no more until some is free, and neither does the arena. Within a block; at its end all uploads are durable, or
    it raises. A file was written window by window, so it is completed at once.
    """

    def __init__(self, completed: Callable[[], None] = lambda: None, meter: SaveMeter | None = None) -> None:
        """Start no thread yet.

        Args:
            completed: Called after each upload, on any thread.
            meter: Measures the uploads; None: nothing does.
        """
        self._meter = meter
        self._threads = WorkerThreads(CALLS_AT_ONCE, "holdfast-complete")
        self._completed = completed
        self._failures: list[BaseException] = []
        self._given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up |= kind is not None
        self._threads.join()
        if kind is None:
            self._raise_failure()

    def begin(self, upload: Completable, total_bytes: int | None = None) -> None:
        """Complete an upload, or abort it if another one has failed.

        Args:
            upload: The upload.
            total_bytes: As for `Upload.complete`.
        Raises:
            CheckpointError: Another upload has failed.
        """
        self._threads.begin(lambda: self._complete(upload, total_bytes))
        self._raise_failure()

    def _complete(self, upload: Completable, total_bytes: int | None) -> None:
        try:
            if self._given_up or self._failures:
                upload.abort()
                return
            with in_flight(self._meter, 0):
                upload.complete(total_bytes)
            self._completed()
        except BaseException as error:  # noqa: BLE001 - `begin` and the end of the block raise it
            self._failures.append(error)
            # The first error says more. A thread that ended here would leave the uploads that wait for it.
            with suppress(Exception):
                upload.abort()

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]


def in_flight(meter: SaveMeter | None, count: int) -> AbstractContextManager[None]:
    """Return a block that counts as a write of some bytes."""
    return _UNMEASURED if meter is None else meter.writing(count)
