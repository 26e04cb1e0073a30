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
from holdfast.plan.plan_cache import Plans
from holdfast.ports.comm import Comm, KeyValueStore
from holdfast.settings import Settings

_TELL_SECONDS = 1.0
"""How long a call to the board may take in any case, so that others hear of an end that has come."""


class Job:
    """A group of ranks with a nonce of its own, so that no key of an earlier life is ever mistaken for ours.

    Construction is a collective: rank 0's nonce goes to every rank.
    """

    def __init__(self, comm: Comm, clock: Clock, settings: Settings) -> None:
        self.comm, self.clock, self.settings = comm, clock, settings
        nonce = clock.random_bytes(8) if comm.rank == 0 else None
        self.nonce = comm.broadcast(nonce).hex()
        self._process = os.getpid()
        self.ends_at: float | None = None
        """When the job will be gone, on the monotonic clock, where that is known: nobody waits longer for others."""
        self.sequence = 0
        """Number of the next opening; ranks that fell behind catch up there."""
        self.arena = Arena(settings.window_bytes, settings.arena_bytes_max, clock)
        """Memory for copies of what is being saved."""
        self._said: set[str] = set()
        self.plans = Plans()
        """Plans of earlier saves."""
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copy")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="holdfast-commit")
        self._last: weakref.ref[Future[None]] | None = None
        self._keys_lock = threading.Lock()
        self._keys: list[tuple[int, str]] = []

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
        """Return when a wait for other ranks that begins now ends, on the monotonic clock."""
        now = self.clock.monotonic_seconds()
        patience = self.settings.commit_timeout_seconds
        return now + (patience if self.ends_at is None else min(patience, max(self.ends_at - now, _TELL_SECONDS)))

    def left(self, deadline: float) -> float:
        """Return the seconds left until a deadline, at least a few milliseconds."""
        return max(deadline - self.clock.monotonic_seconds(), 0.005)

    def in_background(self, work: object, *arguments: object) -> Future[None]:
        """Run the rest of saves one after the other, away from the training thread; interpreter exit waits for them."""
        assert callable(work)
        last = self._commits.submit(work, *arguments)
        # Weakly: what failed would keep all that it was about.
        self._last = weakref.ref(last)
        return last

    @property
    def is_idle(self) -> bool:
        """Whether no save is in the background: the next one need not wait its turn."""
        last = None if self._last is None else self._last()
        return last is None or last.done()

    def copy_in_background(self, work: Callable[[], None]) -> None:
        """Have copies made, those of one save after those of the one before.

        Beside each other two saves could take all buffers between them, and neither go on.
        """
        self._copies.submit(work)

    def is_news(self, said: str) -> bool:
        """Return whether something is said for the first time."""
        if said in self._said:
            return False
        self._said.add(said)
        return True

    def remember(self, sequence: int, keys: Sequence[str]) -> None:
        """Note keys that this rank set for a save, so that `forget_before` can remove them."""
        with self._keys_lock:
            self._keys += [(sequence, key) for key in keys]

    def forget_before(self, sequence: int) -> None:
        """Remove this rank's keys of saves before one that is committed, so that the board stays small.

        A commit carries every rank's vote, and a rank votes only when it is done with the saves before:
        nobody can be waiting on those keys any more. Nothing weaker would do, for a rank that finds an
        outcome gone would take the attempt for undecided and abort it.
        """
        with self._keys_lock:
            old = [key for number, key in self._keys if number < sequence]
            self._keys = [(number, key) for number, key in self._keys if number >= sequence]
        self.key_value_store.delete(old)

    def close(self) -> None:
        """Wait for saves under way and end the thread that carries them."""
        self._copies.shutdown(wait=True)
        self._commits.shutdown(wait=True)
        self.arena.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked after the job was made: its thread is not here, its memory is shared."""
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
