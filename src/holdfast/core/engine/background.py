"""Threads that copy, write and commit in order, and the progress of the writes that other threads wait for."""

from __future__ import annotations

import math
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from holdfast.base.clock import Clock
from holdfast.base.interrupts import Latch, UnlockedFuture, start_thread
from holdfast.errors import UnavailableError

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[[], Any]]
"""A queued call and its future."""

SLICE_SECONDS = 1.0
"""Longest wait at a time: then a waiting thread handles signals, and checks for a write that hangs."""


@dataclass(eq=False, slots=True)
class _Busy:
    """A save that waits for storage."""

    name: str
    began: float
    """Monotonic time of the begin."""

    stall_seconds: float
    """After this time without a written byte the save counts as hung."""

    is_abandoned: bool = False
    """Whether no thread waits for the save any more."""


class WriteProgress:
    """The saves that this process writes, and the time of its last written byte. Any thread may call.

    A long write is not a problem while bytes get written. Without a written byte, storage may never answer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy: dict[_Busy, None] = {}
        """The saves that wait for storage."""
        self._moved_at = clock.monotonic_seconds()
        self.stall_seconds_max = math.inf
        """After this time without a written byte any write counts as hung. Set if the process ends soon."""

    @contextmanager
    def writing(self, name: str, stall_seconds: float) -> Iterator[None]:
        """Record that the block writes a save. Arguments as `asking`."""
        self.note_written()
        try:
            with self.asking(name, stall_seconds):
                yield
        finally:
            self.note_written()

    @contextmanager
    def asking(self, name: str, stall_seconds: float) -> Iterator[None]:
        """Record that the block makes a request for a save. A reply does not show that a write that hangs goes on.

        Args:
            name: Name of the save.
            stall_seconds: After this time without a written byte the save counts as hung. Each job has its own limit.
        """
        busy = _Busy(name, self._clock.monotonic_seconds(), stall_seconds)
        self._busy[busy] = None
        try:
            yield
        finally:
            self._busy.pop(busy, None)

    def give_up(self, name: str) -> None:
        """Record that no thread waits any more for the requests of a save. No new save begins until these end.

        The save counts as hung no earlier than before: saves in flight may go on while storage is slow.
        """
        for busy in list(self._busy):
            if busy.name == name:
                busy.is_abandoned = True

    def note_written(self) -> None:
        """Record that storage has taken bytes, or that a write has ended."""
        self._moved_at = self._clock.monotonic_seconds()

    def idle_seconds(self, since: float) -> float:
        """Return how long no byte was written, counted from a monotonic time at the earliest."""
        return self._clock.monotonic_seconds() - max(since, self._moved_at)

    @property
    def hung(self) -> str | None:
        """A text about the write that hangs, for a message; None without such a write."""
        return self._first_hung(list(self._busy), 0.0)

    def hung_beside(self, own_name: str, stall_seconds: float) -> str | None:
        """Return a text about the write of another save that hangs; None without such a write.

        Args:
            own_name: Name of the calling save.
            stall_seconds: Limit of the calling save: a shorter limit of another job does not count.
        """
        return self._first_hung([busy for busy in list(self._busy) if busy.name != own_name], stall_seconds)

    @property
    def unanswered(self) -> str | None:
        """A text about a request that hangs or was given up, so that no new save begins; None without one."""
        for busy in list(self._busy):
            if busy.is_abandoned:
                return _text_about(busy, self.idle_seconds(busy.began))
        return self.hung

    def _first_hung(self, among: Sequence[_Busy], stall_seconds: float) -> str | None:
        for busy in among:
            seconds = self.idle_seconds(busy.began)
            if seconds >= min(max(busy.stall_seconds, stall_seconds), self.stall_seconds_max):
                return _text_about(busy, seconds)
        return None


def _text_about(busy: _Busy, seconds: float) -> str:
    return f"the {busy.name} has written no byte for {seconds:,.0f} s: storage does not answer"


def _start(thread: threading.Thread) -> None:
    try:
        start_thread(thread)
    except RuntimeError as error:
        raise UnavailableError(
            f"{thread.name}: {error}; expected one more thread. Raise the limit of threads of this process (ulimit -u, "
            "pids.max of the control group), or end other threads"
        ) from error


_Message = Union[_Call, None, "weakref.ref[BackgroundQueue]"]
"""A call, or the end of the thread: None ends the thread for good, a queue only if that queue is idle."""


class BackgroundQueue:
    """Runs calls one after the other on its own thread; interpreter exit waits for the calls, unless a write hangs."""

    def __init__(self, thread_name: str, progress: WriteProgress) -> None:
        """Start no thread yet: the first call starts the thread.

        Args:
            thread_name: Name of the thread.
            progress: Knows whether a write hangs. Neither `close` nor the interpreter waits for such a write.
        """
        self.progress = progress
        self._calls: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        # The thread refers to the calls only: a queue without references is dropped, and ends its thread. The thread is
        # a daemon: the interpreter would wait for any other thread, even if a write hangs.
        self._thread = self._new_thread(thread_name)
        weakref.finalize(self, self._calls.put, None).atexit = False
        _QUEUES.add(self)
        self._last: weakref.ref[Future[object]] | None = None
        self._closed = Latch()

    def _new_thread(self, name: str) -> threading.Thread:
        return threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Run a call after all calls submitted earlier.

        Raises:
            RuntimeError: The queue is closed.
            UnavailableError: No thread could be started.
        """
        future = UnlockedFuture[object]()
        if self._closed.is_set():
            raise RuntimeError(f"{self._thread.name}: the queue is closed")
        if self._thread.ident is None:
            # If no thread can be started now, the call is not taken, and the next call tries again.
            _start(self._thread)
        # A weak reference: the exception of a failed call would keep the objects in its frames alive.
        self._last = weakref.ref(future)
        self._calls.put((future, work))
        if self._closed.is_set():
            # A signal handler has closed the queue since the check above. The thread may have ended before this call.
            with suppress(queue.Empty):
                while (call := self._calls.get_nowait()) is not None:
                    if isinstance(call, tuple):
                        _carry_out(*call)
                self._calls.put(None)
        elif self._thread.ident is None:
            _start(self._thread)  # The thread was idle, and has ended since the check above.
        return future

    def submit_short(self, work: Callable[[], object]) -> Future[object]:
        """Run a short call as `submit` does; on this thread if no thread can be started."""
        try:
            return self.submit(work)
        except UnavailableError:
            future = UnlockedFuture[object]()
            _carry_out(future, work)
            return future

    @property
    def is_idle(self) -> bool:
        """Whether every submitted call has ended, so that the next call starts at once."""
        last = None if self._last is None else self._last()
        return last is None or last.done()

    def end_if_idle(self) -> None:
        """End the thread if no call goes on, or the last call ends within a second; the next call starts another."""
        if self._last is not None and (last := self._last()) is not None:
            with suppress(TimeoutError):
                last.exception(SLICE_SECONDS)  # A save is committed a moment before its call ends.
        thread = self._thread
        if thread.is_alive() and not self._closed.is_set() and self.is_idle:
            self._calls.put(weakref.ref(self))
            if thread is not threading.current_thread():
                thread.join(SLICE_SECONDS)

    def replace_thread(self) -> None:
        """Have another thread make the calls from now on; called on the thread that ends."""
        # Before the check for calls. A later call then finds a thread to start.
        self._thread = self._new_thread(self._thread.name)
        if not self._calls.empty():
            with suppress(RuntimeError):  # The next call tries again.
                start_thread(self._thread)

    def close(self) -> None:
        """Wait for the calls submitted so far, then end the thread. A thread whose write hangs goes on."""
        self._closed.set()
        self._calls.put(None)
        while (thread := self._thread).is_alive() and thread is not threading.current_thread():
            thread.join(SLICE_SECONDS)
            if self.progress.hung is not None:
                return


class DaemonCalls:
    """Makes calls on daemon threads at once. A call that hangs delays no other call and no interpreter exit."""

    def __init__(self) -> None:
        # The idle threads. A deque, whose operations are atomic: a signal handler may save at any time.
        self._idle: deque[tuple[queue.SimpleQueue[_Call | None], threading.Thread]] = deque()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Make a call on another thread.

        Raises:
            UnavailableError: No thread could be started.
        """
        future = UnlockedFuture[T]()
        try:
            inbox, _ = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            _start(threading.Thread(target=self._work, args=(inbox,), name="holdfast-call", daemon=True))
        inbox.put((future, work))
        return future

    def forget_threads(self) -> None:
        """Forget all threads: a forked child does not have these threads."""
        self._idle.clear()

    def end_idle(self) -> None:
        """End the idle threads."""
        with suppress(IndexError):
            while True:
                inbox, thread = self._idle.pop()
                inbox.put(None)
                if thread is not threading.current_thread():
                    thread.join()

    def _work(self, inbox: queue.SimpleQueue[_Call | None]) -> None:
        idle = inbox, threading.current_thread()
        while (call := inbox.get()) is not None:
            # Idle before the result is set: the thread that gets the result may make the next call on this thread.
            _carry_out(*call, note_done=lambda: self._idle.append(idle))
            del call  # A waiting thread keeps nothing alive.


DAEMON_POOL = DaemonCalls()
"""For calls that a training thread waits for in slices, to handle signals and give up in between."""

os.register_at_fork(after_in_child=DAEMON_POOL.forget_threads)


def end_idle_threads() -> None:
    """End the threads that wait for calls, for code after a training that counts threads, such as a test.

    Example:
        holdfast.api.end_idle_threads()
    """
    DAEMON_POOL.end_idle()
    for each in list(_QUEUES):
        each.end_if_idle()


def wait_in_slices(future: Future[T], seconds: float, clock: Clock, note_slice: Callable[[], None]) -> T:
    """Return the result of a call, waiting in slices of a second.

    Args:
        future: The call.
        seconds: Limit of the wait.
        clock: Measures the wait.
        note_slice: Called after each slice without a result.
    Raises:
        TimeoutError: The call goes on after the limit.
        BaseException: The call failed with this error.
    """
    end = clock.monotonic_seconds() + seconds
    while not future.done():
        left = end - clock.monotonic_seconds()
        if left <= 0:
            raise TimeoutError
        if not are_done([future], min(left, SLICE_SECONDS), clock):
            note_slice()
    return future.result()


def are_done(futures: Sequence[Future[T]], seconds: float, clock: Clock) -> bool:
    """Wait until all calls have ended; return False after the limit. `concurrent.futures.wait` takes plain locks.

    Args:
        futures: The calls.
        seconds: Limit of the wait.
        clock: Measures the wait.
    """
    end = clock.monotonic_seconds() + seconds
    for future in futures:
        # Not by `result`: the call itself may have raised a TimeoutError.
        with suppress(TimeoutError):
            future.exception(max(end - clock.monotonic_seconds(), 0.0))
    return all(future.done() for future in futures)


def side_by_side(*calls: Callable[[], T]) -> list[T]:
    """Make several calls at once, the last on this thread; return their results in order, once all have ended.

    Raises:
        BaseException: The error of the first failed call.
    """
    futures = [_begun(call) for call in calls[:-1]]
    for call in calls[-1:]:
        futures.append(UnlockedFuture())
        _carry_out(futures[-1], call)
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def _begun(call: Callable[[], T]) -> Future[T]:
    try:
        return DAEMON_POOL.submit(call)
    except UnavailableError:  # No thread could be started: this thread makes the call.
        future = UnlockedFuture[T]()
        _carry_out(future, call)
        return future


_SOON_SECONDS = 5.0
"""Longest wait for work that follows a success, since the caller waits."""


def is_done_soon(work: Callable[[], object], clock: Clock) -> bool:
    """Do work that follows a success on another thread; return whether the work ended within a few seconds.

    Longer work goes on without the caller: a success must count although storage hangs now.

    Raises:
        BaseException: The work failed with this error.
    """
    future = DAEMON_POOL.submit(work)
    with suppress(TimeoutError):
        wait_in_slices(future, _SOON_SECONDS, clock, lambda: None)
    if not future.done():
        return False
    future.result()
    return True


_QUEUES: weakref.WeakSet[BackgroundQueue] = weakref.WeakSet()


def _work(calls: queue.SimpleQueue[_Message]) -> None:
    """Make calls until None arrives, or the queue itself, which then needs another thread."""
    while (call := calls.get()) is not None:
        if isinstance(call, tuple):
            _carry_out(*call)
        elif (owner := call()) is not None:
            owner.replace_thread()
            return
        # A waiting thread keeps nothing alive.
        del call


def _carry_out(future: Future[Any], work: Callable[[], Any], note_done: Callable[[], None] = lambda: None) -> None:
    """Make a call, and pass on the result or error.

    Args:
        future: Receives the result.
        work: The call.
        note_done: Called after the call, before the result can be seen.
    """
    try:
        result, failure = work(), None
    except BaseException as error:  # noqa: BLE001 - raised by `result` of the future
        result, failure = None, error
    note_done()
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
        # The traceback of the error refers to this frame, which would keep the state in `work` alive.
        del failure, future, work, note_done


def _finish_calls() -> None:
    for each in list(_QUEUES):
        each.close()


# As an executor of the standard library does: before the interpreter joins threads and runs `atexit` functions, so that
# the calls can still start threads.
threading._register_atexit(_finish_calls)  # type: ignore[attr-defined]
