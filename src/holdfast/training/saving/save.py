"""One save, from the state to the published manifest. `save` reads top-down in the order of what happens.

`attempt.py` lists the states of a save, and what ends it in each state.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from holdfast.base.interrupts import Latch, require_uninterrupted
from holdfast.base.ports.framework import Collected
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.plan import PlannedPack
from holdfast.base.types.reports import SaveReport
from holdfast.core.engine.gc_pause import is_small_transfer
from holdfast.core.format.pack import HeaderBody
from holdfast.core.format.part import RankPart
from holdfast.core.plan.coding.kinds import OwnedKinds, kinds_owned
from holdfast.core.plan.grid import cut_at_grid
from holdfast.core.plan.ownership import Owned, owned_by
from holdfast.core.plan.packing import PackSizes, cell_elements_max, packs_of
from holdfast.core.plan.pairs import Pairs
from holdfast.core.plan.plan_cache import SavePlan, save_plan, with_header
from holdfast.settings import Settings
from holdfast.training.coordination.job import Job
from holdfast.training.saving.attempt import SaveAttempt
from holdfast.training.saving.coding import SaveCoding
from holdfast.training.saving.commit import asking_for_exclusive_creates
from holdfast.training.saving.fingerprint import StateFingerprint
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.pairing import known_weights, pairs_of_plan
from holdfast.training.saving.rank_part import PartBuilder
from holdfast.training.saving.request import SaveRequest
from holdfast.training.saving.transfer import Transfer
from holdfast.training.telemetry.dispatcher import EventDispatcher


def begin_save(job: Job, request: SaveRequest, dispatcher: EventDispatcher | None = None) -> SaveHandle:
    """Save a state, and return once training may go on. Arguments and errors as `save` and `SaveAttempt`."""
    attempt = SaveAttempt(job, request, dispatcher)
    with attempt.gc_pause:
        return save(attempt)


def save_and_wait(job: Job, request: SaveRequest) -> SaveReport:
    """Save a state, and return once it is committed; nothing is copied first. Errors as `save` and its handle."""
    attempt, over = SaveAttempt(job, request, awaited=True), Latch()
    attempt.handle.committed.add_done_callback(lambda _: over.set())
    # Pause until the wait ends: by then the objects of the save are freed, and the collector never walks them.
    with attempt.gc_pause:
        report = save(attempt).wait()
    if request.on_end is not None:
        over.wait()  # Callbacks run in order, on the commit thread: the caller finds everything done.
    assert report is not None, "committed comes with a report"
    return report


def save(attempt: SaveAttempt) -> SaveHandle:
    """Save a state: agree, copy or write this rank's share, and leave the rest to the commit thread.

    Args:
        attempt: The save on this rank. Every rank calls.
    Returns:
        The handle. It carries every failure after the ranks agreed.
    Raises:
        InvalidError: The state or the call is wrong, or ranks disagree; nothing was written on any rank.
    """
    job, request, trace = attempt.job, attempt.request, attempt.trace
    with attempt.foreground():
        require_uninterrupted(attempt.name)
        sequence = attempt.open()
        with trace.phase("collect"):
            collected = request.collect()
            fingerprint = StateFingerprint(collected, job, attempt.location, sequence)
            statement = fingerprint.statement(attempt.step, overwrites=request.overwrites)
            statement = replace(statement, is_loaded=request.is_loaded)
        attempt.record_collected()
        with trace.phase("agree"):
            agreement = attempt.agree(statement, fingerprint)
        if agreement.context.loaded is not None:
            attempt.handle.reach_staged()
            attempt.finish_in_background(lambda: attempt.end_unwritten(_unwritten_report(attempt)))
            return attempt.handle

        share = RankShare(attempt, collected, fingerprint)
        share.begin(collected)

        def finish() -> None:
            # On the commit thread. The committing rank calls `request.parent()` before it publishes. Every rank calls
            # `request.committed()` after the commit.
            vote = attempt.write_part(share.part())
            attempt.conclude(attempt.vote_and_commit(vote), share.report)

        attempt.finish_in_background(finish)
    return attempt.handle


class RankShare:
    """What one rank writes of an attempt. Its transfer alone refers to the state, until the state is copied."""

    def __init__(self, attempt: SaveAttempt, collected: Collected, fingerprint: StateFingerprint) -> None:
        """Plan it, and leave out what the base step holds; no byte is copied yet.

        Args:
            attempt: The save, which the ranks have agreed on.
            collected, fingerprint: The state of this rank.
        """
        self._attempt, job, request, trace = attempt, attempt.job, attempt.request, attempt.trace
        agreement, self._deduplicator = attempt.agreement, request.deduplicator
        with trace.phase("plan"):
            self._plan, self._is_new_plan, self._coding = plan_packs(attempt, collected, fingerprint)
        with trace.phase("compare"):
            sources = [local.source for local in collected.shards]
            pairs = pairs_of_plan(self._plan, sources, request.writer)
            self._plan = self._deduplicator.without_unchanged(self._plan, sources, agreement.context, attempt.link_pack)
            weights = known_weights(pairs, self._deduplicator.unchanged_pieces)
            self._packs = name_packs(attempt, self._plan, weights.pairs)
        with trace.phase("replicas") if job.settings.compare_replicas else nullcontext():
            self._part_builder = PartBuilder(job, collected, fingerprint, agreement)
        writer = request.writer.through(attempt.location.store)
        if self._coding is not None:
            writer = writer.measured_by(self._coding.meter, self._coding.probe)
            self._coding.announce(trace)
        on_written = attempt.commit_vote.note_written
        self._transfer = Transfer(job, attempt.handle, writer, self._packs, trace, on_written, weights)
        self._stored_bytes = 0
        self._codings: tuple[KindCoding, ...] = ()
        self._skipped = tuple(collected.skipped)
        attempt.attach_transfer(self._transfer)

    def begin(self, collected: Collected) -> None:
        """Write or copy the state, or start to copy it lazily; return once training may go on."""
        attempt = self._attempt
        self._require_exclusive = asking_for_exclusive_creates(attempt.location.store, attempt.job.comm.rank)
        self._transfer.begin(collected, awaited=attempt.awaited)

    def part(self) -> RankPart:
        """Return the part of this rank, which it votes for, once its packs are durable; raises as `Transfer.written`.

        Raises:
            InvalidError: On rank 0: two writers can create one object here.
        """
        written = self._transfer.written()
        self._require_exclusive()
        self._stored_bytes = sum(each.stored_bytes(pack.plan) for pack, each in zip(self._packs, written, strict=True))
        if self._coding is not None:
            self._codings = self._coding.end(self._packs)
        return self._part_builder.part(self._deduplicator, self._packs, written)

    def report(self) -> SaveReport:
        """Return the report of this rank."""
        attempt, transfer, counts = self._attempt, self._transfer, self._attempt.trace.retry_counts
        return SaveReport(
            step=attempt.location.step,
            url=attempt.location.url,
            attempt=attempt.agreement.attempt,
            bytes=self._plan.bytes,
            unchanged_bytes=self._deduplicator.unchanged_bytes,
            tensors=self._plan.tensors,
            planned=self._is_new_plan,
            staging=transfer.staging,
            staged_seconds=transfer.staged_seconds,
            fence_seconds=transfer.fence_seconds,
            waited_seconds=transfer.waited_seconds,
            committed_seconds=attempt.trace.seconds,
            divergent=attempt.agreement.differing,
            skipped=self._skipped,
            phases=attempt.trace.phases,
            retries=counts.retries,
            retry_seconds=counts.seconds,
            throttled=counts.throttled,
            stored_bytes=self._stored_bytes,
            codings=self._codings,
        )


def plan_packs(
    attempt: SaveAttempt, collected: Collected, fingerprint: StateFingerprint
) -> tuple[SavePlan, bool, SaveCoding | None]:
    """Decide what this rank writes, or find that an earlier save decided it.

    Returns:
        The plan, whether it is new, and what is coded; None without compression.
    """
    job, agreement = attempt.job, attempt.agreement
    rank, settings = job.comm.rank, job.settings
    shards = [local.shard for local in collected.shards]
    holders = agreement.holders_of_each([shard.tensor.fqn for shard in shards if shard.holders is None])
    holders.update(agreement.sibling_writers)

    # Parameters and their moments must come from one rank if replicas differ.
    is_drifted = agreement.drift is not None
    sizes = sizes_of_packs(attempt.location.store.object_bytes_max, settings)
    compresses, tuning = settings.compression != "off", settings._tuning

    def own() -> list[Owned]:
        owned = owned_by(rank, shards, holders, settings.chunk_bytes, lowest_only=is_drifted, keeps_pairs=compresses)
        return owned if sizes is None else cut_at_grid(shards, owned, sizes.cell_elements)

    def own_by_kind() -> OwnedKinds:
        return kinds_owned(shards, own(), settings.compression_skip, tuning.coded_bytes_min)

    key = fingerprint.shards + f"{is_drifted} {sizes}".encode()
    coding = None
    if compresses:
        by_kind, _ = job.coding.owned_kinds.of(key, holders, own_by_kind)
        coding = SaveCoding(job, attempt.location, by_kind, attempt.request.writer)
        key += f" {coding.key}".encode()

    def plan() -> SavePlan:
        owned, pieces = (own(), None) if coding is None else (by_kind.owned, coding.pieces)
        packs = packs_of(rank, shards, owned, tuning.pack_header_bytes_max, sizes, pieces)
        headed = [with_header(pack, settings.chunk_bytes) for pack in packs]
        return save_plan(headed, settings.chunk_bytes, tuning.unchanged_bytes_min)

    chosen, is_new = job.plan_cache.of(key, holders, plan)
    if not is_small_transfer(chosen.bytes):
        attempt.gc_pause.end()
    return chosen, is_new, coding


def sizes_of_packs(object_bytes_max: int | None, settings: Settings) -> PackSizes | None:
    """Return the sizes of packs in a store with a largest object; None in a store of files."""
    if object_bytes_max is None:
        return None
    tuning, in_flight_max = settings._tuning, settings.object_bytes_in_flight_max
    # A cap holds within a tenth over ten objects, so they must be small.
    share = 1 if settings.max_bytes_per_second is None else tuning.capped_pack_share
    # Such a store gets a pack in one request, and until then all of the pack is in memory.
    bytes_max = min(object_bytes_max, in_flight_max)
    return PackSizes(
        full_bytes=min(tuning.full_pack_bytes // share, in_flight_max // 8),
        bytes_max=bytes_max,
        cell_elements=min(tuning.cell_elements // share, cell_elements_max(bytes_max)),
    )


def name_packs(attempt: SaveAttempt, plan: SavePlan, pairs: Pairs) -> list[PlannedPack]:
    """Return the packs of a plan with their keys and headers; their keys count as this rank's files from now on.

    Args:
        attempt: The save.
        plan: The packs.
        pairs: The weights that masters among the pieces were perhaps rounded from.
    """
    step = "" if attempt.location.step is None else str(attempt.location.step)
    provenance = {"step": step, "attempt": attempt.agreement.attempt, "rank": str(attempt.job.comm.rank)}
    packs = []
    for pack, body in plan.packs:
        key = attempt.key(pack.name)
        if isinstance(body, HeaderBody):
            packs.append(PlannedPack(key, body.header(provenance), pack))
            continue
        weights = (pairs.get((item.tensor.fqn, item.region), "") for item in pack.items)
        coded = body.with_pairs(filter(None, weights))
        header = partial(coded.header, provenance)
        packs.append(PlannedPack(key, b"", pack, coded.header_bytes(provenance), header))
    attempt.file_keys += [pack.key for pack in packs]
    return packs


def _unwritten_report(attempt: SaveAttempt) -> SaveReport:
    """Return the report of a save that finds its step saved already."""
    counts = attempt.trace.retry_counts
    return SaveReport(
        step=attempt.location.step,
        url=attempt.location.url,
        attempt="",
        bytes=0,
        unchanged_bytes=0,
        tensors=0,
        planned=False,
        staging="none",
        staged_seconds=attempt.trace.seconds,
        fence_seconds=0.0,
        waited_seconds=0.0,
        committed_seconds=attempt.trace.seconds,
        divergent=(),
        skipped=(),
        phases=attempt.trace.phases,
        retries=counts.retries,
        retry_seconds=counts.seconds,
        throttled=counts.throttled,
    )
