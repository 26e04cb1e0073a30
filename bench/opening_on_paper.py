"""The opening of a save by thousands of ranks, in one process: every record is the real one, only rank 0 waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.synthetic import SyntheticJob
from holdfast.backends.alone import InProcessKeyValueStore
from holdfast.base.clock import SystemClock
from holdfast.base.geometry.tensor import Shard
from holdfast.base.ports.framework import Collected
from holdfast.base.types.plan import PackPlan
from holdfast.core.format.digest import short_digest_of
from holdfast.core.format.pack import coded_header_body, header_of
from holdfast.core.plan.coding.coded_pieces import CodingChoice
from holdfast.core.plan.grid import cut_at_grid
from holdfast.core.plan.ownership import Owned, owned_by
from holdfast.core.plan.packing import PackSizes, packs_of
from holdfast.settings import Settings
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.agreement.details import encode_details, encode_difference
from holdfast.training.coordination.agreement.records import Agreement, Details, Statement
from holdfast.training.coordination.agreement.save_agreement import SaveAgreement
from holdfast.training.coordination.agreement.sibling_meshes import encode_tensors
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.saving.fingerprint import StateFingerprint
from tests.doubles.comm import ThreadComm, ThreadGroup

Coding = Callable[[Sequence[Shard], Sequence[Owned]], CodingChoice]
"""Chooses which pieces a rank codes, by its shards and what it owns of them."""

STEP = 1000
POSITION = "loader.position"


class Left(BaseException):
    """Raised in a rank that is not measured, at the point where it would wait.

    It is no `Exception`: a rank that fails refuses the save, and this one goes on elsewhere.
    """


class LeavingBoard(InProcessKeyValueStore):
    """The board as a rank sees it that leaves at one of its waits."""

    def __init__(self, board: InProcessKeyValueStore, waits: int) -> None:
        """Share the keys of `key_value_store`, and leave once `waits` waits are over."""
        self._values, self._changed = board._values, board._changed
        self._waits = waits

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """As the port says, until the rank leaves."""
        if not self._waits:
            raise Left
        self._waits -= 1
        return super().get_many(keys, timeout_seconds)


class LoneComm(ThreadComm):
    """A comm whose collectives no other rank joins."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the nonce that rank 0 gives to the job."""
        return [b"on paper"]


@dataclass(frozen=True)
class Opened:
    """An opening that came to an agreement, and what rank 0 planned on it."""

    agreement: Agreement
    classes: list[tuple[int, ...]]
    """Ranks with one layout, ascending; one class per stage."""

    digests: list[StateFingerprint]
    """What the lowest rank of each class says; its equals but for their own random states."""

    plan_seconds: float
    """On rank 0: from the state to the headers of its packs, reading every rank's record included."""


def paper_context(is_held: bool) -> SaveContext:
    """Return the decisions of rank 0 on a save on paper."""
    return SaveContext(run_id="paper", created="2026-01-01T00:00:00+00:00")


def packs_on(
    rank: int,
    collected: Collected,
    agreement: Agreement,
    settings: Settings,
    sizes: PackSizes | None = None,
    coding: Coding | None = None,
) -> list[tuple[PackPlan, bytes]]:
    """Return a rank's packs and their headers; cut for a store of objects if packs have sizes.

    The header of a coded pack is not known before its data: it is as many zero bytes.
    """
    shards = [each.shard for each in collected.shards]
    holders = agreement.holders_of_each([each.tensor.fqn for each in shards if each.holders is None])
    owned = owned_by(rank, shards, holders, settings.chunk_bytes, keeps_pairs=coding is not None)
    if sizes is not None:
        owned = cut_at_grid(shards, owned, sizes.cell_elements)
    provenance = {"step": str(STEP), "attempt": agreement.attempt, "rank": str(rank)}
    choice = None if coding is None else coding(shards, owned)
    packs = packs_of(rank, shards, owned, settings._tuning.pack_header_bytes_max, sizes, choice)
    return [
        (
            plan,
            bytes(coded_header_body(plan, settings.chunk_bytes).header_bytes(provenance))
            if plan.is_coded
            else header_of(plan, provenance),
        )
        for plan in packs
    ]


def opened(job: SyntheticJob, place: CheckpointLocation, settings: Settings, sizes: PackSizes | None = None) -> Opened:
    """Let every rank of a job publish its record; rank 0 decides and plans."""
    # Nothing is copied here, so no rank needs to find out who shares its memory.
    settings = replace(settings, arena_bytes_max=0)
    group = ThreadGroup(job.world_size)
    digest = short_digest_of(place.url.encode())
    leaders = [stage * job.ranks_per_stage for stage in range(job.stages)]
    spoken: list[StateFingerprint] = []
    statements: list[Statement] = []
    threads: list[threading.Thread] = []
    for leader in leaders:
        board = LeavingBoard(group.key_value_store, 1)
        leader_job = Job(LoneComm(group, leader, board), SystemClock(), settings)
        digests = StateFingerprint(job.collected_on(leader), leader_job, place)
        spoken.append(digests)
        statements.append(digests.statement(STEP))
        if leader:
            threads.append(_speaking(SaveAgreement(leader_job, STEP, digest).take_number(), statements[-1], digests))
    for rank in range(job.world_size):
        if rank not in leaders:
            silent = Job(LoneComm(group, rank, LeavingBoard(group.key_value_store, 0)), SystemClock(), settings)
            _state(SaveAgreement(silent, STEP, digest).take_number(), statements[job.stage_of(rank)], spoken[0])
    while len(group.key_value_store.keys()) < job.world_size - 1:
        time.sleep(0.01)
    first_job = Job(LoneComm(group, 0), SystemClock(), settings)
    start = time.perf_counter()
    collected = job.collected_on(0)
    own = StateFingerprint(collected, first_job, place)
    agreement = SaveAgreement(first_job, STEP, digest).take_number().agree(own.statement(STEP), own, paper_context)
    packs_on(0, collected, agreement, settings, sizes)
    seconds = time.perf_counter() - start
    for thread in threads:
        thread.join()
    classes = [tuple(range(leader, leader + job.ranks_per_stage)) for leader in leaders]
    assert agreement.class_ranks == classes[0], "every stage is a class of its own"
    return Opened(agreement, classes, spoken, seconds)


def _speaking(opening: SaveAgreement, statement: Statement, state: StateFingerprint) -> threading.Thread:
    """Let the lowest rank of a class take part until it has published its tensors."""
    thread = threading.Thread(target=_state, args=(opening, statement, state))
    thread.start()
    return thread


def _state(opening: SaveAgreement, statement: Statement, state: StateFingerprint) -> None:
    try:
        opening.agree(statement, state, paper_context)
    except Left:
        return
    raise AssertionError("a rank that is not measured came to the end of the opening")


class CountingBoard(InProcessKeyValueStore):
    """The board as rank 0 sees it: counts the bytes that come to it."""

    def __init__(self, board: InProcessKeyValueStore) -> None:
        """Share the keys of `board`."""
        self._values, self._changed = board._values, board._changed
        self.received = 0

    def get_many(self, keys: Sequence[str], timeout_seconds: float) -> list[bytes]:
        """As the port says."""
        found = super().get_many(keys, timeout_seconds)
        self.received += sum(map(len, found))
        return found

    def compare_set(self, key: str, expected: bytes, desired: bytes, timeout_seconds: float) -> bytes:
        """As the port says."""
        found = super().compare_set(key, expected, desired, timeout_seconds)
        self.received += len(found)
        return found


def opened_with_a_difference(job: SyntheticJob, place: CheckpointLocation, settings: Settings) -> tuple[int, float]:
    """Let one value differ on every rank; return the bytes that come to rank 0, and the seconds it takes to decide.

    Every other rank has set all that it would set before rank 0 begins.
    """
    settings = replace(settings, arena_bytes_max=0)
    group = ThreadGroup(job.world_size)
    board = CountingBoard(group.key_value_store)
    leaders = [stage * job.ranks_per_stage for stage in range(job.stages)]
    jobs = [Job(LoneComm(group, rank, board), SystemClock(), settings) for rank in leaders]
    first_job = jobs[0]
    fingerprints = [
        _PositionedFingerprint(job.collected_on(rank), leader_job, place)
        for rank, leader_job in zip(leaders, jobs, strict=True)
    ]
    statements = [fingerprint.statement(STEP) for fingerprint in fingerprints]
    details = [fingerprint.details() for fingerprint in fingerprints]
    for rank, fingerprint in zip(leaders, fingerprints, strict=True):
        record = encode_tensors(fingerprint.tensors_on_meshes())
        board.set(first_job.key("opening", 0, "meshes", rank), record, 60.0)
    for rank in range(1, job.world_size):
        stage = job.stage_of(rank)
        statement = replace(statements[stage], other=short_digest_of(rank.to_bytes(4)))
        if rank % job.ranks_per_stage:
            # Only the first rank of a mesh states its ranks.
            statement = replace(statement, meshes=tuple(each._replace(mesh=None) for each in statement.meshes))
        if rank % job.ranks_per_stage:
            record = encode_difference(details[stage], _at_position(details[stage], rank))
        else:
            record = encode_details(details[stage])
        board.set(first_job.key("opening", 0, "open", rank), statement.encode(), 60.0)
        board.set(first_job.key("opening", 0, "details", rank), record, 60.0)
    opening = SaveAgreement(first_job, STEP, short_digest_of(place.url.encode())).take_number()
    start = time.perf_counter()
    agreement = opening.agree(statements[0], fingerprints[0], paper_context)
    seconds = time.perf_counter() - start
    assert agreement.divergent == (POSITION,), agreement.divergent
    return board.received, seconds


class _PositionedFingerprint(StateFingerprint):
    """The state of a rank whose data loader has a position of its own."""

    def details(self) -> Details:
        """Return the details, the position included."""
        return _at_position(super().details(), self._slots.rank)


def _at_position(details: Details, rank: int) -> Details:
    """Return the details of a rank whose data loader has a position of its own."""
    return replace(details, other={**details.other, POSITION: short_digest_of(rank.to_bytes(4)).hex()})
