"""Threads that copy, write and commit in order, and the progress of the writes that others wait for."""

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
"""What is called, and who gets the result."""

SLICE_SECONDS = 1.0
"""Longest wait at a time: after it a waiting thread handles signals, and looks whether a write hangs."""


@dataclass(eq=False, slots=True)
class _Busy:
    """A save that writes or asks."""

    name: str
    began: float
    """When, on the monotonic clock."""

    stall_seconds: float
    """After this time without a written byte it counts as hung."""

    is_abandoned: bool = False
    """Whether nobody waits for it any more."""


class WriteProgress:
    """The saves that this process writes, and when it last wrote a byte. Any thread may call.

    A write that takes long is no problem while bytes get written. If none does, storage may never answer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy: dict[_Busy, None] = {}
        """The saves that write or ask."""
        self._moved_at = clock.monotonic_seconds()
        self.stall_seconds_max = math.inf
        """After this time without a written byte any write counts as hung: the process ends soon."""

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
        """Record that the block asks storage for a save. An answer is no sign that a write which hangs goes on.

        Args:
            name: Name of the save.
            stall_seconds: After this time without a written byte it counts as hung. Each job has a limit of its own.
        """
        busy = _Busy(name, self._clock.monotonic_seconds(), stall_seconds)
        self._busy[busy] = None
        try:
            yield
        finally:
            self._busy.pop(busy, None)

    def give_up(self, name: str) -> None:
        """Record that nobody waits any more for what a save writes or asks: until it ends no new save begins.

        It counts as hung no earlier than before: saves in flight may go on while storage is slow to answer it.
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
        """A text about the write that hangs, for a message; None if none does."""
        return self._first_hung(list(self._busy), 0.0)

    def hung_beside(self, own_name: str, stall_seconds: float) -> str | None:
        """Return a text about the write of another save that hangs; None if none does.

        Args:
            own_name: Name of the save that asks.
            stall_seconds: Its limit. The write of another job with a shorter limit hangs for it only after its own.
        """
        return self._first_hung([busy for busy in list(self._busy) if busy.name != own_name], stall_seconds)

    @property
    def unanswered(self) -> str | None:
        """A text about what hangs, or what nobody waits for any more, so that no new save begins; None if nothing."""
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
"""A call, or what ends the thread: None for good, the queue if it is idle."""


class BackgroundQueue:
    """Runs calls one after the other on a thread of its own; interpreter exit waits for them, unless a write hangs."""

    def __init__(self, thread_name: str, progress: WriteProgress) -> None:
        """Start no thread yet: the first call does.

        Args:
            thread_name: Name of the thread.
            progress: Knows whether a write hangs. Neither `close` nor the interpreter waits for such a write.
        """
        self.progress = progress
        self._calls: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        # The thread refers to the calls only: a queue that nobody refers to is dropped, and ends its thread. It is a
        # daemon: the interpreter would wait for any other thread, also for one whose write hangs.
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
            # If no thread can be started now, the call is not taken, and the next one tries again.
            _start(self._thread)
        # A weak reference: the exception of a failed call would keep the objects in its frames alive.
        self._last = weakref.ref(future)
        self._calls.put((future, work))
        if self._closed.is_set():
            # By a signal handler, since the look above. The thread may have ended before it came to this call.
            with suppress(queue.Empty):
                while (call := self._calls.get_nowait()) is not None:
                    if isinstance(call, tuple):
                        _carry_out(*call)
                self._calls.put(None)
        elif self._thread.ident is None:
            _start(self._thread)  # The one that was there has ended since the look, for it was idle.
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
        """Whether every submitted call has ended, so that the next one starts at once."""
        last = None if self._last is None else self._last()
        return last is None or last.done()

    def end_if_idle(self) -> None:
        """End the thread if no call goes on, or the last one ends within a second; the next call starts another."""
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
        # Before the look at the calls. A call that is put after that look finds a thread to start.
        self._thread = self._new_thread(self._thread.name)
        if not self._calls.empty():
            with suppress(RuntimeError):  # The next call tries again.
                start_thread(self._thread)

    def close(self) -> None:
        """Wait for the calls submitted so far, then end the thread. A thread whose write hangs is left behind."""
        self._closed.set()
        self._calls.put(None)
        while (thread := self._thread).is_alive() and thread is not threading.current_thread():
            thread.join(SLICE_SECONDS)
            if self.progress.hung is not None:
                return


class DaemonCalls:
    """Makes calls on daemon threads at once. A call that hangs delays no other, and interpreter exit waits for none."""

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
        """Forget all threads: a forked child has none of them."""
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
            # Idle before the result is there: the thread that gets it may make the next call on this one.
            _carry_out(*call, note_done=lambda: self._idle.append(idle))
            del call  # This thread keeps nothing alive while it waits.


DAEMON_POOL = DaemonCalls()
"""For calls that a training thread waits for in slices, so that it handles signals and can give up."""

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
        clock: Measures it.
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
    """Wait until all calls have ended; return False if that took longer. `concurrent.futures.wait` takes plain locks.

    Args:
        futures: The calls.
        seconds: Limit of the wait.
        clock: Measures it.
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
        BaseException: What the first of them that failed raised.
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
    except UnavailableError:  # No thread could be started: this one makes the call.
        future = UnlockedFuture[T]()
        _carry_out(future, call)
        return future


_SOON_SECONDS = 5.0
"""Longest wait for what follows a success: its caller waits."""


def is_done_soon(work: Callable[[], object], clock: Clock) -> bool:
    """Do on another thread what follows a success; return whether it ended within a few seconds. If not, it goes on.

    What succeeded must count for its caller although storage hangs now.

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
    """Make calls until None comes, or the queue itself, which then needs another thread."""
    while (call := calls.get()) is not None:
        if isinstance(call, tuple):
            _carry_out(*call)
        elif (owner := call()) is not None:
            owner.replace_thread()
            return
        # This thread keeps nothing alive while it waits.
        del call


def _carry_out(future: Future[Any], work: Callable[[], Any], note_done: Callable[[], None] = lambda: None) -> None:
    """Make a call, and pass on its result or its error.

    Args:
        future: Receives the result.
        work: The call.
        note_done: Called after it, before the result can be seen.
    """
    try:
        result, failure = work(), None
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
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
