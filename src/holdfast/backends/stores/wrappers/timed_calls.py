"""Calls on threads of their own, so that a caller can stop waiting for one that does not end."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from holdfast.base.interrupts import UnlockedFuture, start_thread
from holdfast.base.ports.temporary import TemporaryError
from holdfast.errors import UnavailableError

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[[], Any]]

_IDLE_THREADS_MAX = 64
"""Threads kept for later calls. More than a limit on requests lets begin are never needed again."""


class TimedCalls:
    """Makes calls on daemon threads, and abandons a call after its time.

    An abandoned call goes on until it ends, and keeps what it refers to. So no call may touch memory that its caller
    uses again.
    """

    def __init__(self) -> None:
        self._idle: deque[queue.SimpleQueue[_Call]] = deque()

    def run(self, call: Callable[[], T], seconds: float, where: str) -> T:
        """Return the result of a call.

        Args:
            call: Made on another thread.
            seconds: Its time limit.
            where: What is called, for the message.
        Raises:
            TemporaryError: It did not end in time; it may still take effect.
            UnavailableError: No thread could be started.
            BaseException: It failed with this error.
        """
        future = UnlockedFuture[T]()
        self._submit(future, call)
        try:
            # As an exception, not by `result`: the call itself may have raised a TimeoutError.
            error = future.exception(seconds)
        except TimeoutError:
            raise TemporaryError(
                f"{where}: no answer within {seconds:.3g} s", is_throttled=True, may_take_effect=True
            ) from None
        if error is not None:
            try:
                raise error
            finally:
                del error, future  # The traceback refers to this frame.
        return future.result()

    def _submit(self, future: Future[T], call: Callable[[], T]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(inbox,), name="holdfast-request", daemon=True)
            try:
                start_thread(thread)
            except RuntimeError as error:
                raise UnavailableError(
                    f"{thread.name}: {error}; expected one more thread. Raise the limit of threads of this process "
                    "(ulimit -u, pids.max of the control group), or end other threads"
                ) from error
        inbox.put((future, call))

    def _work(self, inbox: queue.SimpleQueue[_Call]) -> None:
        is_kept = True
        while is_kept:
            future, call = inbox.get()
            try:
                result, failure = call(), None
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                result, failure = None, error
            # Idle before the result is there: the caller may make its next call on this thread.
            is_kept = len(self._idle) < _IDLE_THREADS_MAX
            if is_kept:
                self._idle.append(inbox)
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            # This thread keeps nothing alive while it waits.
            del future, call, result, failure

    def forget_threads(self) -> None:
        """Forget all threads: a forked child has none of them."""
        self._idle.clear()


TIMED_CALLS = TimedCalls()
"""The threads of this process."""

os.register_at_fork(after_in_child=TIMED_CALLS.forget_threads)
