"""What makes a save, a wait or a load safe in a signal handler: one lock that shows, and waits that take none.

Python runs a signal handler on the main thread, between two bytecodes. A lock that the interrupted code holds is
released only after the handler. A reentrant lock is no way out: the handler waits for other threads, which need it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

from holdfast.errors import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_SECONDS = 1.0
"""Longest sleep of a wait without a limit. A Ctrl-C in the midst of `Latch.set` may leave a waiting thread asleep."""

# The lock that this module is about.
GUARD = threading.RLock()
"""The one lock that a training thread takes where other threads of saves and loads need it too. Blocks under it are
short, and wait for no other thread. So whoever finds it owned by the own thread runs in a handler that interrupted such
a block. Used as `with GUARD:`, which a Ctrl-C cannot leave half done."""

os.register_at_fork(before=GUARD.acquire, after_in_parent=GUARD.release, after_in_child=GUARD.release)


def require_uninterrupted(name: str) -> None:
    """Raise if this thread was interrupted under `GUARD`: a wait for other threads would never end.

    Args:
        name: What was called, for the message.
    Raises:
        UnavailableError: It was.
    """
    if GUARD._is_owned():  # type: ignore[attr-defined]
        raise UnavailableError(
            f"{name}: called in a signal handler that interrupted Holdfast itself on thread "
            f"{threading.current_thread().name}; expected a call outside of it. Nothing was begun. Call "
            "request_save() in the handler, or call this again once the handler has returned"
        )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, unless it was started. Until it runs, this thread holds locks that every new thread needs.

    Raises:
        RuntimeError: No thread could be started.
    """
    with GUARD:
        if thread.ident is None:
            thread.start()


class Latch:
    """An event that is set once. It has no lock, unlike that of `threading`: `set` waits for no thread in `wait`."""

    def __init__(self) -> None:
        self._is_set = False
        # Each waiting thread sleeps on a lock of its own. Operations of a dict are atomic.
        self._sleepers: dict[threading.Lock, None] = {}

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake every waiting thread."""
        self._is_set = True
        with suppress(KeyError):  # None is left: a thread that comes now finds it set.
            while True:
                self._sleepers.popitem()[0].release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; return False if that took longer than `timeout` seconds.

        Raises:
            UnavailableError: In a signal handler that interrupted Holdfast itself.
        """
        while not self._is_set:
            require_uninterrupted("a wait")
            sleeper = threading.Lock()  # Only this thread waits for it.
            sleeper.acquire()
            self._sleepers[sleeper] = None
            try:
                if not self._is_set:
                    sleeper.acquire(timeout=_SLICE_SECONDS if timeout is None else max(timeout, 0.0))
            finally:
                self._sleepers.pop(sleeper, None)
            if timeout is not None:
                break
        return self._is_set


class UnlockedFuture(Future[T]):
    """A future whose methods take no lock of its own. It cannot be cancelled; asyncio would do so at a timeout.

    The result is stored at once, in one step. `concurrent.futures.wait` works too, and takes the lock of its base.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._latch = Latch()
        self._ends: dict[bool, tuple[T | None, BaseException | None]] = {}
        self._callbacks: deque[Callable[[Future[T]], object]] = deque()

    def done(self) -> bool:
        """Return whether it has ended."""
        return bool(self._ends)

    def result(self, timeout: float | None = None) -> T:
        """Return the result; raise the error, or TimeoutError after `timeout` seconds without an end."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # The traceback refers to this frame.
        return self._ends[True][0]  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, None for a result; raise TimeoutError after `timeout` seconds without an end."""
        if not self._ends:
            self._latch.wait(timeout)
        if not self._ends:
            raise TimeoutError
        return self._ends[True][1]

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function at the end, on the thread that ends it; at once if it has ended."""
        self._callbacks.append(fn)
        if self._ends:
            self._call_back()

    def set_result(self, result: T) -> None:
        """End it with a result; raise InvalidStateError if it has ended."""
        self._end(result, None)
        super().set_result(result)
        self._call_back()

    def set_exception(self, exception: BaseException | None) -> None:
        """End it with an error; raise InvalidStateError if it has ended."""
        self._end(None, exception)
        super().set_exception(exception)
        self._call_back()

    def _end(self, result: T | None, error: BaseException | None) -> None:
        end = result, error
        if self._ends.setdefault(True, end) is not end:
            raise InvalidStateError("it has ended")
        self._latch.set()

    def _call_back(self) -> None:
        while self._callbacks:
            with suppress(IndexError):  # Another thread took the last.
                callback = self._callbacks.popleft()
                try:
                    callback(self)
                except Exception:
                    logger.exception("a callback at the end of a save or call failed")
