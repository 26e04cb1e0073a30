"""Garbage collection on a thread of its own, behind training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.errors import ConflictError
from holdfast.runs.collection.garbage_collection import CheckpointGC

logger = logging.getLogger(__name__)

_END_SECONDS = 5.0
"""Longest wait for a collection under way while a run is closed. Storage may never answer."""


class Background:
    """Collects after each commit, on a thread, until the run is closed."""

    def __init__(self, collector: CheckpointGC, grace_seconds: float) -> None:
        self._collector, self._grace_seconds = collector, grace_seconds
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        self._has_ended = False
        self._release: Callable[[], None] = lambda: None

    def want(self) -> None:
        """Request a collection: now, or after the one under way."""
        self._wanted.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="holdfast-collect", daemon=True)
            self._thread.start()

    def close(self, release: Callable[[], None]) -> None:
        """End the thread, then release the writer lease. A grace is cut short; a removal gets a few seconds.

        Args:
            release: Releases the writer lease. If the thread is left behind, it does that itself at its end: nobody
                else may write while it removes files.
        """
        self._closed.set()
        self._wanted.set()
        if self._thread is None:
            release()
            return
        try:
            self._thread.join(_END_SECONDS)
        finally:
            # After Ctrl-C too: it ends the wait, not the collection.
            with self._ending:
                is_left = not self._has_ended
                if is_left:
                    self._release = release
            if not is_left:
                release()
        if is_left:
            logger.warning(
                "%s: garbage collection did not end within %g s of the close. It goes on while this process "
                "lives, and then gives up the right to write here. The next collection removes what is left",
                self._collector.url,
                _END_SECONDS,
            )

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._ending:
                self._has_ended = True
            self._release()

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed.is_set():
                return
            self._wanted.clear()
            try:
                report = self._collector.collect(self._grace_seconds, self._closed.wait)
            except ConflictError as over:
                logger.warning("collecting ends: %s", over)
                return
            except Exception as error:  # noqa: BLE001 - the next commit tries again
                self._collector.warn_once("nothing was collected: %s: %s", type(error).__name__, error)
            else:
                if report is not None and (report.steps or report.superseded or report.files):
                    steps = [*report.steps, *report.superseded]
                    logger.info("collected steps %s: %d bytes", steps, report.bytes)
