"""The ranks that save and load together, for the life of the process."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from holdfast.clock import Clock
from holdfast.engine.arena import Arena
from holdfast.errors import BY_NAME, CheckpointError, CorruptError, MissingError, UnavailableError
from holdfast.format.digest import short_digest_of
from holdfast.plan.plan_cache import PlanCache
from holdfast.ports.comm import Comm, KeyValueStore
from holdfast.ports.framework import Framework
from holdfast.settings import Settings

_TELL_SECONDS = 1.0
"""How long a call to the board may take in any case, so that others hear of an end that has come."""


class BackgroundQueue:
    """Runs calls one after the other on a thread of its own; interpreter exit waits for them."""

    def __init__(self, thread_name: str) -> None:
        """Start no thread yet: the first call does."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._last: weakref.ref[Future[None]] | None = None

    def submit(self, work: Callable[..., object], *arguments: object) -> Future[None]:
        """Run a call after those submitted before it."""
        future: Future[None] = self._executor.submit(work, *arguments)  # type: ignore[arg-type]
        # Weakly: the exception of a failed call would keep everything alive that its frames refer to.
        self._last = weakref.ref(future)
        return future

    @property
    def is_idle(self) -> bool:
        """Whether every call so far is over, so that the next one starts at once."""
        last = None if self._last is None else self._last()
        return last is None or last.done()

    def close(self) -> None:
        """Wait for the calls submitted so far, then end the thread."""
        self._executor.shutdown(wait=True)


class Job:
    """The ranks that save and load together, and what they share for the life of the process.

    Both paths take it. A nonce keeps its keys apart from those of an earlier job on the same key-value store.
    Construction is a collective: rank 0 sends the nonce to every rank.
    """

    def __init__(
        self, comm: Comm, clock: Clock, settings: Settings, framework: Framework | None = None, *, saves: bool = True
    ) -> None:
        """Agree on the nonce.

        Args:
            comm: The ranks.
            clock: Time and randomness.
            settings: How the job saves and loads.
            framework: Takes states apart and fills them; None for a job that only moves stored bytes.
            saves: False for a job that only loads: it needs no keys, so construction is no collective then.
        """
        self.comm, self.clock, self.settings, self._framework = comm, clock, settings, framework
        self.nonce = ""
        if saves:
            self.nonce = comm.broadcast(clock.random_bytes(8) if comm.rank == 0 else None).hex()
        self._process = os.getpid()
        self.process_deadline: float | None = None
        """Monotonic time at which the process will be gone, where that is known: no wait for other ranks is longer."""
        self.sequence = 0
        """Number of the next save; ranks that fell behind catch up there."""
        self.arena = Arena(settings.window_bytes, settings.arena_bytes_max, clock)
        """Memory for copies of what is being saved."""
        self.plan_cache = PlanCache()
        """Plans of earlier saves."""
        self.copies = BackgroundQueue("holdfast-copy")
        """Copies of states. One queue: two saves at once could take all buffers between them, and neither go on."""
        self.commits = BackgroundQueue("holdfast-commit")
        """Writes, votes and commits of saves, away from the training thread."""
        self._logged: set[str] = set()
        self._keys_lock = threading.Lock()
        self._keys: list[tuple[int, str]] = []

    @property
    def framework(self) -> Framework:
        """What takes states apart and fills them."""
        assert self._framework is not None, "this job moves stored bytes only"
        return self._framework

    @property
    def key_value_store(self) -> KeyValueStore:
        """The job's key-value store."""
        return self.comm.key_value_store

    def key(self, *parts: object) -> str:
        """Return a key of this job."""
        return "/".join((self.nonce, *map(str, parts)))

    def attempt_id(self, sequence: int, step: int) -> str:
        """Return the id of one try at one step, 16 hex digits: hash(nonce, sequence, step)."""
        return short_digest_of(self.nonce.encode(), str(sequence).encode(), str(step).encode()).hex()

    def deadline(self) -> float:
        """Return when a wait for other ranks that begins now ends, in monotonic seconds."""
        now = self.clock.monotonic_seconds()
        timeout = self.settings.commit_timeout_seconds
        return now + (
            timeout if self.process_deadline is None else min(timeout, max(self.process_deadline - now, _TELL_SECONDS))
        )

    def seconds_left(self, deadline: float) -> float:
        """Return the seconds left until a deadline, at least a few milliseconds."""
        return max(deadline - self.clock.monotonic_seconds(), 0.005)

    def is_first_occurrence(self, message: str) -> bool:
        """Return whether a message has not been logged yet, and take note of it."""
        if message in self._logged:
            return False
        self._logged.add(message)
        return True

    def record_keys(self, sequence: int, keys: Sequence[str]) -> None:
        """Note keys that this rank set for a save, so that `delete_keys_before` can remove them."""
        with self._keys_lock:
            self._keys += [(sequence, key) for key in keys]

    def delete_keys_before(self, sequence: int) -> None:
        """Remove this rank's keys of saves before a committed one, so that the key-value store stays small.

        A commit carries every rank's vote, and a rank votes only when it is done with the saves before. So no rank
        can still wait on those keys. No weaker rule would do: a rank that finds an outcome gone would take the
        attempt for undecided, and abort it.
        """
        with self._keys_lock:
            old = [key for number, key in self._keys if number < sequence]
            self._keys = [(number, key) for number, key in self._keys if number >= sequence]
        self.key_value_store.delete(old)

    def close(self) -> None:
        """Wait for saves in the background, then end their threads and free the arena."""
        self.copies.close()
        self.commits.close()
        self.arena.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked after the job was made: the job's threads do not exist here."""
        return os.getpid() != self._process


def error_text(error: BaseException) -> str:
    """Return an error as ASCII text that another rank can raise again."""
    kind = type(error).__name__ if isinstance(error, CheckpointError) else UnavailableError.__name__
    message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return json.dumps({"kind": kind, "message": message[:20_000], "absent": is_absence(error)})


def is_absence(error: BaseException) -> bool:
    """Return whether damage is that something named is not there."""
    if not isinstance(error, CorruptError):
        return False
    cause = error.__cause__
    while cause is not None and not isinstance(cause, MissingError):
        cause = cause.__cause__
    return cause is not None


def error_from(text: str, prefix: str = "") -> CheckpointError:
    """Return the error that `error_text` wrote down, as the same kind."""
    document = json.loads(text)
    return BY_NAME.get(document["kind"], UnavailableError)(prefix + document["message"])


def raise_together(statuses: Sequence[str | None], own_rank: int, own: BaseException | None) -> None:
    """Raise on every rank if any rank failed.

    A rank raises its own error; the others raise the lowest failing rank's, its rank in the message. Where
    several ranks failed, all of them are the cause, as a group.

    Args:
        statuses: By rank, an `error_text` or None.
        own_rank: This rank.
        own: What this rank met.
    """
    failed = [(rank, text) for rank, text in enumerate(statuses) if text is not None]
    if not failed:
        return
    errors = [error_from(text, f"rank {rank}: ") for rank, text in failed]
    cause = ExceptionGroup(f"{len(errors)} ranks failed", errors) if len(errors) > 1 else None
    if own is not None:
        _raise_from(own, cause)
    _raise_from(errors[0], cause)


def _raise_from(error: BaseException, cause: BaseException | None) -> NoReturn:
    if cause is None:
        raise error
    raise error from cause
