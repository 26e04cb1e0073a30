"""Calls that every rank must make: after ten seconds one rank finds out which ranks have not called, and logs it.

States of a call on one rank, and who moves it from one to the next:

    called   -> arrived   a background thread after two seconds: a key states that this rank has called
    arrived  -> overdue   the same thread after ten seconds: the first rank to claim a key asks for every other rank
    any      -> ended     the training thread, once every rank has called or the call has failed; the keys are deleted

Most calls end within two seconds, and cost the key-value store nothing. An agreement on a save needs no such thread:
its statements show who has called.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from holdfast.base.interrupts import require_uninterrupted
from holdfast.base.ports.comm import Comm
from holdfast.core.engine.background import DAEMON_POOL
from holdfast.errors import CheckpointError, first_three
from holdfast.training.coordination.job import is_elected

logger = logging.getLogger(__name__)

ASK_SECONDS = 10.0
"""How long a rank waits for the others before one rank asks which ranks have not called."""

ASKING_RANKS = 64
"""The lowest ranks, of which one is elected to ask. An election costs the key-value store a request of each rank."""

_ARRIVAL_SECONDS = 2.0
"""How long a rank waits before it states that it has called. A rank that called later counts as absent."""

_END_SECONDS = 1.0
"""Longest wait for the thread at the end: it may be in a call to the key-value store."""

_CALL_SECONDS = 60.0
"""Limit of one call to the key-value store."""


def log_absent(name: str, call: str, absent: Sequence[int] | None, comm: Comm) -> None:
    """Log that a call has waited for other ranks.

    Args:
        name: Name of what the call does.
        call: The call that every rank must make.
        absent: The ranks that have not made it; None if another rank asks for them.
        comm: The ranks.
    """
    if absent is None:
        logger.info(
            "%s: rank %d has waited %g s for other ranks. Another rank logs which ranks have not called; every rank "
            "must call %s",
            name,
            comm.rank,
            ASK_SECONDS,
            call,
        )
    elif absent:
        logger.warning(
            "%s: ranks [%s] did not call %s within %g s of rank %d; expected all %d ranks. Every rank must call it: "
            "move it out of branches that only some ranks take, such as `if rank == 0:`",
            name,
            first_three(absent),
            call,
            ASK_SECONDS,
            comm.rank,
            comm.world_size,
        )
    else:
        logger.info("%s: every rank has called %s; some rank has worked on it for %g s", name, call, ASK_SECONDS)


def ranks_without(ranks: Sequence[int], have_all: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the ranks whose key is not set.

    It asks for all at once, then for each half that lacks a key: for one rank of 16,384 that is 29 requests.

    Args:
        ranks: The ranks, ascending.
        have_all: Asks whether the keys of ranks are all set.
    """
    if not ranks or have_all(ranks):
        return []
    if len(ranks) == 1:
        return [*ranks]
    middle = len(ranks) // 2
    return ranks_without(ranks[:middle], have_all) + ranks_without(ranks[middle:], have_all)


class CallWatch:
    """Watches, on one rank, a call that every rank must make. A context manager around the call.

    A collective says nothing about a rank that does not call, and its timeout ends the training.
    """

    def __init__(self, comm: Comm, name: str, call: str) -> None:
        """Begin to watch.

        Args:
            comm: The ranks.
            name: Name of what the call does, for the log.
            call: The call. A rank makes one call of this name at a time.
        Raises:
            UnavailableError: In a signal handler that interrupted Holdfast itself.
        """
        require_uninterrupted(name)
        self._comm, self._name, self._call = comm, name, call
        # For a thread of this call alone; `end` waits for that for a limited time.
        self._ended = threading.Event()
        self._watching = DAEMON_POOL.submit(self._watch) if comm.world_size > 1 else None

    def __enter__(self) -> Self:
        """Return the watch."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the watch."""
        self.end()

    def end(self) -> None:
        """End the watch: every rank has called. Any further call does nothing."""
        self._ended.set()
        if self._watching is not None:
            # The next call finds the thread idle, and the keys deleted.
            with suppress(TimeoutError):
                self._watching.exception(_END_SECONDS)

    def _watch(self) -> None:
        if self._ended.wait(_ARRIVAL_SECONDS):
            return
        keys = self._comm.key_value_store
        own = [self._key(self._comm.rank)]
        # The log is a help only: a failure of the key-value store is reported by the calls that need it.
        with suppress(CheckpointError, TimeoutError):
            keys.set(own[0], b"called", _CALL_SECONDS)
            try:
                if not self._ended.wait(ASK_SECONDS - _ARRIVAL_SECONDS):
                    # If each asked for every rank, the store would answer for hours.
                    if is_elected(self._comm, self._key("asking"), _CALL_SECONDS):
                        own.append(self._key("asking"))
                    self._log(is_asking=len(own) > 1)
                self._ended.wait()
            finally:
                keys.delete(own)

    def _log(self, *, is_asking: bool) -> None:
        absent = None
        if is_asking:
            present = self._comm.key_value_store.present
            absent = ranks_without(range(self._comm.world_size), lambda ranks: present(*map(self._key, ranks)))
        if not self._ended.is_set():  # Meanwhile the last rank may have called.
            log_absent(self._name, self._call, absent, self._comm)

    def _key(self, part: object) -> str:
        # No nonce: a call that makes one, and a load by path, have none. Other groups may use the same store.
        return f"calls/{self._comm.group_id}/{self._call}/{part}"
