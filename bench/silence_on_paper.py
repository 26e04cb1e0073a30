"""The calls to the key-value store while thousands of ranks open a save and one of them is dead, in one process.

Limit: the ranks run one after the other, so this counts calls and measures no time. All ranks arrive at one time, and
the lowest one alive decides at its deadline. A wait of another rank that ends before runs out.

Every rank runs the real agreement. A call counts as the requests that `TorchKeyValueStore` sends for it: one, except
that a successful `get_many` is a wait and a read. A wait that times out counts as two, since c10d cancels it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bench.opening_on_paper import LoneComm, paper_context
from bench.synthetic import SyntheticJob
from holdfast.backends.alone import InProcessKeyValueStore
from holdfast.base.clock import SystemClock
from holdfast.errors import UnavailableError
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.agreement.save_agreement import SaveAgreement
from holdfast.training.coordination.job import Job
from holdfast.training.saving.fingerprint import StateFingerprint
from tests.doubles.comm import ThreadGroup

STEP = 1000
_VERDICT = "/verdict"
"""What ends the key that rank 0, or the elected rank, sets as it decides."""


class PaperClock(SystemClock):
    """A clock that moves on only while a call waits."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.seconds = 0.0

    def monotonic_seconds(self) -> float:
        """Return the seconds since all ranks arrived."""
        return self.seconds


class UndecidedStore(InProcessKeyValueStore):
    """The key-value store as one rank sees it: a decision is there from a time on.

    No call waits: no other rank runs meanwhile. A key that is not there now stays absent until the limit of the call.
    """

    def __init__(self, shared: InProcessKeyValueStore, clock: PaperClock, decided_at: float) -> None:
        """Share the keys of `shared`."""
        self._values, self._changed = shared._values, shared._changed
        self._clock, self._decided_at = clock, decided_at
        self.requests = 0

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """As the port says."""
        self.requests += 1
        super().set(key, value, timeout_seconds)

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """As the port says."""
        self.requests += 2
        clock = self._clock
        if not all(map(self._is_seen, keys)):
            end = clock.seconds + timeout_seconds
            is_decided = end >= self._decided_at and all(key in self._values for key in keys)
            clock.seconds = max(clock.seconds, self._decided_at) if is_decided else end
            if not is_decided:
                raise TimeoutError(f"{keys[0]}: not set")
        return [self._values[key] for key in keys]

    def present(self, *keys: str) -> bool:
        """As the port says."""
        self.requests += 1
        return all(map(self._is_seen, keys))

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """As the port says."""
        self.requests += 1
        return super().add(key, amount, timeout_seconds)

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """As the port says."""
        self.requests += 1
        return super().compare_set(key, expected, desired, timeout_seconds)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """As the port says, without waiting."""
        self.get_many(keys, timeout_seconds)

    def delete(self, keys: Sequence[str]) -> None:
        """As the port says."""
        self.requests += len(keys)
        super().delete(keys)

    def _is_seen(self, key: str) -> bool:
        return key in self._values and (self._clock.seconds >= self._decided_at or not key.endswith(_VERDICT))


def calls_with_a_dead_rank(job: SyntheticJob, place: CheckpointLocation, settings: Settings) -> dict[str, int]:
    """Return the requests of all ranks from the first arrival to the last refusal, for a dead rank 0 and another one.

    Returns:
        `store_calls_dead_rank`, the larger one, and `store_calls_dead_rank_not_0`.
    """
    settings = replace(settings, arena_bytes_max=0)
    leader = LoneComm(ThreadGroup(job.world_size), 0)
    state = StateFingerprint(job.collected_on(0), Job(leader, SystemClock(), settings), place)
    dead_other = _requests(job.world_size, job.world_size - 1, state, settings)
    dead_first = _requests(job.world_size, 0, state, settings)
    return {"store_calls_dead_rank": max(dead_other, dead_first), "store_calls_dead_rank_not_0": dead_other}


def _requests(world_size: int, dead: int, state: StateFingerprint, settings: Settings) -> int:
    group = ThreadGroup(world_size)
    statement = state.statement(STEP)
    alive = [rank for rank in range(world_size) if rank != dead]
    nonce = Job(LoneComm(group, alive[0]), SystemClock(), settings).nonce
    # All have arrived before the first one decides. Each sets the same record again when its turn comes.
    for rank in alive:
        group.key_value_store.set(f"{nonce}/opening/0/open/{rank}", statement.encode(), 60.0)
    requests, decided_at = 0, math.inf
    for rank in alive:
        clock = PaperClock()
        store = UndecidedStore(group.key_value_store, clock, decided_at)
        agreement = SaveAgreement(Job(LoneComm(group, rank, store), clock, settings), STEP, b"on paper").take_number()
        assert _is_refused(partial(agreement.agree, statement, state, paper_context)), "no save without every rank"
        # The lowest rank alive decides: rank 0, or the elected one.
        decided_at = min(decided_at, clock.seconds)
        requests += store.requests
    return requests


def _is_refused(agree: Callable[[], object]) -> bool:
    try:
        agree()
    except UnavailableError:
        return True
    return False
