"""One save, from the state to the published manifest. `save` reads top-down in the order of events.

`attempt.py` lists the states of a save, and the end of a save in each state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from holdfast.base.interrupts import Latch
from holdfast.base.ports.framework import Collected
from holdfast.base.types.coding import KindCoding
from holdfast.base.types.reports import SaveReport
from holdfast.core.format.part import RankPart
from holdfast.training.coordination.job import Job
from holdfast.training.saving.attempt import SaveAttempt
from holdfast.training.saving.commit import asking_for_exclusive_creates
from holdfast.training.saving.fingerprint import StateFingerprint
from holdfast.training.saving.handle import SaveHandle
from holdfast.training.saving.rank_packs import Owners, RankPacks, deduplicate, name_packs, plan
from holdfast.training.saving.rank_part import PartBuilder
from holdfast.training.saving.target import Collect, SaveTarget
from holdfast.training.saving.transfer import Transfer
from holdfast.training.telemetry.dispatcher import EventDispatcher


def begin_save(job: Job, target: SaveTarget, collect: Collect, dispatcher: EventDispatcher | None = None) -> SaveHandle:
    """Save a state, and return once training may go on. Arguments and errors as `save` and `SaveAttempt`."""
    attempt = SaveAttempt(job, target, dispatcher)
    with attempt.gc_pause:
        return save(attempt, collect)


def save_and_wait(job: Job, target: SaveTarget, collect: Collect) -> SaveReport:
    """Save a state, and return once it is committed; nothing is copied first. Errors as `save` and the handle."""
    attempt, over = SaveAttempt(job, target, awaited=True), Latch()
    attempt.handle.near.add_done_callback(lambda _: over.set())
    # Pause until the wait ends: by then the objects of the save are freed, and the collector never walks them.
    with attempt.gc_pause:
        report = save(attempt, collect).wait()
    if target.on_end is not None:
        over.wait()  # Callbacks run in order, on the commit thread: after the last one `on_end` has returned.
    assert report is not None, "committed comes with a report"
    return report


def save(attempt: SaveAttempt, collect: Collect) -> SaveHandle:
    """Save a state: agree, copy or write this rank's share, and leave the rest to the commit thread.

    Args:
        attempt: The save on this rank. Every rank calls.
        collect: Takes the state apart.
    Returns:
        The handle, which carries every failure after the ranks agreed.
    Raises:
        InvalidError: The state or the call is wrong, or ranks disagree; nothing was written on any rank.
    """
    job, target, trace = attempt.job, attempt.target, attempt.trace
    attempt.begin()
    try:
        sequence = attempt.take_number()
        with trace.phase("collect"):
            collected = collect()
            fingerprint = StateFingerprint(collected, job, attempt.location, sequence)
            statement = fingerprint.statement(attempt.step, overwrites=target.overwrites)
        with trace.phase("agree"):
            agreement = attempt.agree(statement, fingerprint)
            target = attempt.target  # Of a save without room near, the target is now in the root.
        if agreement.context.loaded is not None:
            attempt.handle.attempt = agreement.context.loaded[1]  # No attempt: the drain knows the step by its digest.
            attempt.handle.reach_staged()
            attempt.finish_in_background(lambda: attempt.end_unwritten(_unwritten_report(attempt)))
            return attempt.handle

        with trace.phase("plan"):
            planned = plan(job, target, collected, Owners.agreed(agreement, collected), fingerprint.shards)
        target.planned(agreement.attempt, planned.save)
        attempt.end_pause_for(planned.save.bytes)
        with trace.phase("compare"):
            rest, weights = deduplicate(target, planned.save, collected, agreement.context, attempt.link_pack)
        packs = name_packs(planned, rest, weights, attempt.folder, attempt.provenance)
        share = stage(attempt, packs, collected, fingerprint)

        def finish() -> None:
            # On the commit thread. No name here refers to the state: the state is freed after the copy.
            part, written = write(share)
            vote = attempt.write_part(part)
            # The caller goes on once the save is committed. With many tensors, its collector would walk the part.
            del part
            attempt.conclude(attempt.vote_and_commit(vote), lambda: report_of(share, written))

        attempt.finish_in_background(finish)
    except BaseException as error:  # noqa: BLE001 - `end_in_call` ends the save by the rules of its state, and may raise
        attempt.end_in_call(error)
    return attempt.handle


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank in a staged save. Only the transfer refers to the state, until the copy ends."""

    attempt: SaveAttempt
    """The save."""

    packs: RankPacks
    """The packs of this rank."""

    transfer: Transfer
    """Moves the bytes of the packs."""

    part_builder: PartBuilder
    """Builds the part of this rank."""

    require_exclusive_creates: Callable[[], None]
    """Waits for the answer of the store; raises if two writers can create one object."""

    skipped: tuple[str, ...]
    """Names that the selection leaves out."""


@dataclass(frozen=True, slots=True)
class Written:
    """The share of one rank in a save whose packs are durable, for the report."""

    stored_bytes: int
    """Bytes of tensors in storage."""

    codings: tuple[KindCoding, ...]
    """The compression of each kind of tensor; empty without compression."""


def stage(attempt: SaveAttempt, packs: RankPacks, collected: Collected, fingerprint: StateFingerprint) -> Share:
    """Write or copy the state, or start a lazy copy; return once training may go on."""
    job, store, coding = attempt.job, attempt.location.store, packs.planned.coding
    with attempt.trace.phase("replicas") if job.settings.compare_replicas else nullcontext():
        part_builder = PartBuilder(job, collected, fingerprint, attempt.agreement)
    writer = attempt.target.writer.through(store)
    if coding is not None:
        writer = writer.measured_by(coding.meter, coding.probe)
        coding.announce(attempt.trace)
    on_written = attempt.commit_vote.note_written
    transfer = Transfer(job, attempt.handle, writer, packs.packs, attempt.trace, on_written, packs.weights)
    attempt.attach_transfer(transfer, (pack.key for pack in packs.packs))
    require = asking_for_exclusive_creates(store, job.comm.rank)
    transfer.stage(collected, awaited=attempt.awaited)
    return Share(attempt, packs, transfer, part_builder, require, tuple(collected.skipped))


def write(share: Share) -> tuple[RankPart, Written]:
    """Write the packs unless `stage` wrote them; return once the packs are durable.

    Returns:
        The part of this rank, for which the rank votes, and the facts for the report.
    Raises:
        InvalidError: A tensor changed before its lazy copy. On rank 0: two writers can create one object here.
        CheckpointError: A pack could not be written.
    """
    packs, deduplicator, coding = share.packs.packs, share.attempt.target.deduplicator, share.packs.planned.coding
    written = share.transfer.write()
    share.require_exclusive_creates()
    facts = Written(
        codings=() if coding is None else coding.end(packs),
        stored_bytes=sum(each.stored_bytes(pack.plan) for pack, each in zip(packs, written, strict=True)),
    )
    return share.part_builder.part(deduplicator, packs, written), facts


def report_of(share: Share, written: Written) -> SaveReport:
    """Return the report of this rank."""
    attempt, transfer, rest = share.attempt, share.transfer, share.packs.rest
    return replace(
        _unwritten_report(attempt),
        attempt=attempt.agreement.attempt,
        bytes=rest.bytes,
        unchanged_bytes=attempt.target.deduplicator.unchanged_bytes,
        tensors=rest.tensors,
        planned=share.packs.planned.is_new,
        staging=transfer.staging,
        staged_seconds=transfer.staged_seconds,
        fence_seconds=transfer.fence_seconds,
        waited_seconds=transfer.waited_seconds,
        divergent=attempt.agreement.differing,
        skipped=share.skipped,
        stored_bytes=written.stored_bytes,
        codings=written.codings,
    )


def _unwritten_report(attempt: SaveAttempt) -> SaveReport:
    """Return the report of a save that writes nothing: the step is saved already."""
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
        tier=attempt.target.tier,
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
