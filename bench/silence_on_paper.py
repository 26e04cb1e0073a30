"""The calls to the key-value store while thousands of ranks open a save and one of them is dead, in one process.

Limit: the ranks run one after the other, so this counts calls and measures no time. The order is the worst one that
the deadlines allow: all ranks arrive before any of them decides, and all deadlines pass before the refusal is set.

Every rank runs the real agreement. A call counts as the requests that `TorchKeyValueStore` sends for it: one, except
that a successful `get_many` is a wait and a read. A wait that times out counts as two, since c10d cancels it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bench.opening_on_paper import LoneComm, paper_context
from bench.synthetic import SyntheticJob
from holdfast.checkpoint.location import CheckpointLocation
from holdfast.clock import SystemClock
from holdfast.coordination.job import Job
from holdfast.coordination.opening.agreement import SaveAgreement
from holdfast.errors import UnavailableError
from holdfast.ports.in_process import InProcessKeyValueStore
from holdfast.saving.fingerprint import StateFingerprint
from holdfast.settings import Settings
from holdfast.testing.comm import ThreadGroup

STEP = 1000
_OF_RANK_0 = ("/verdict", "opening/next")
"""What ends a key that rank 0, or the elected rank, sets as it decides."""


class UndecidedStore(InProcessKeyValueStore):
    """The key-value store as one rank sees it: without a decision until the rank's first call of `decided_by`.

    No call waits: a key that is not there now stays absent until the deadline, because no other rank runs meanwhile.
    """

    def __init__(self, shared: InProcessKeyValueStore, decided_by: str) -> None:
        """Share the keys of `shared`."""
        self._values, self._changed = shared._values, shared._changed
        self._decided_by, self._is_decided = decided_by, False
        self.requests = 0

    def set(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """As the port says."""
        self._count("set")
        super().set(key, value, timeout_seconds)

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """As the port says, without waiting."""
        self._count("get_many", 2)
        if all(map(self._is_seen, keys)):
            return [self._values[key] for key in keys]
        raise TimeoutError(f"{keys[0]}: not set")

    def present(self, key: str) -> bool:
        """As the port says."""
        self._count("present")
        return self._is_seen(key)

    def add(self, key: str, amount: int, timeout_seconds: float) -> int:
        """As the port says."""
        self._count("add")
        return super().add(key, amount, timeout_seconds)

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """As the port says."""
        self._count("compare_set")
        return super().compare_set(key, expected, desired, timeout_seconds)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """As the port says, without waiting."""
        self.get_many(keys, timeout_seconds)

    def delete(self, keys: Sequence[str]) -> None:
        """As the port says."""
        self._count("delete", len(keys))
        super().delete(keys)

    def _count(self, verb: str, requests: int = 1) -> None:
        self.requests += requests
        self._is_decided |= verb == self._decided_by

    def _is_seen(self, key: str) -> bool:
        return key in self._values and (self._is_decided or not key.endswith(_OF_RANK_0))


def calls_with_a_dead_rank(job: SyntheticJob, place: CheckpointLocation, settings: Settings) -> dict[str, int]:
    """Return the requests of all ranks from the first arrival to the last refusal, for a dead rank 0 and another one.

    Returns:
        `store_calls_dead_rank`, the larger one, and `store_calls_dead_rank_not_0`.
    """
    settings = replace(settings, arena_bytes_max=0)
    leader = LoneComm(ThreadGroup(job.world_size), 0)
    state = StateFingerprint(job.collected_on(0), Job(leader, SystemClock(), settings), place)
    # With rank 0 alive, it decides first and the others find its verdict once they wait. With rank 0 dead, the others
    # find no verdict before one of them is elected.
    dead_other = _requests(job.world_size, job.world_size - 1, "set", state, settings)
    dead_first = _requests(job.world_size, 0, "compare_set", state, settings)
    return {"store_calls_dead_rank": max(dead_other, dead_first), "store_calls_dead_rank_not_0": dead_other}


def _requests(world_size: int, dead: int, decided_by: str, state: StateFingerprint, settings: Settings) -> int:
    group = ThreadGroup(world_size)
    statement = state.statement(STEP)
    alive = [rank for rank in range(world_size) if rank != dead]
    stores = {rank: UndecidedStore(group.key_value_store, decided_by) for rank in alive}
    jobs = {rank: Job(LoneComm(group, rank, stores[rank]), SystemClock(), settings) for rank in alive}
    # All have arrived before the first one decides. Each sets the same record again when its turn comes.
    for rank in alive:
        group.key_value_store.set(jobs[rank].key("opening", 0, "open", rank), statement.encode(), 60.0)
    for job in jobs.values():
        agreement = SaveAgreement(job, STEP, b"on paper")
        assert _is_refused(partial(agreement.agree, statement, state, paper_context)), "no save without every rank"
    return sum(store.requests for store in stores.values())


def _is_refused(agree: Callable[[], object]) -> bool:
    try:
        agree()
    except UnavailableError:
        return True
    return False
