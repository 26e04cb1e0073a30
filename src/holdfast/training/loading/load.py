"""One load of a job: resolve, request and plan, agree, read or exchange, restore. `load` reads top-down.

The states of a load, the same on every rank at each collective, and who moves it on:

- resolving: rank 0 chooses a step, reads and judges its manifest and index. Its broadcast ends this state.
- planned: each rank alone has computed its reads, or has an error. Nobody has changed a value.
- agreed: the statuses showed every rank that all of them can load, and whether they exchange bytes.
- filling: each rank writes its tensors from storage or from bytes of other ranks, and checks every digest.
- verified: a gather of errors showed every rank that all tensors of all ranks are placed.
- restored: each rank has put back the values that are not tensors. A gather of errors ends the load.
- failed: a collective showed an error of some rank; every rank raises.
- fell back: a gather showed every rank that the step is damaged, and every rank raises `StepDamaged`. `load`
  catches it and is resolving again, with an older step, or with the new checkpoint if one at a path was overwritten.
  Any state after resolving can lead here.

A load of one exact step cannot fall back. It skips the gather of "verified": only the gather that ends the load follows
the filling.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.base.geometry.box import Box
from holdfast.base.name_patterns import judge_unmatched
from holdfast.base.ports.framework import Catalog, Restoration, Wanted
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.plan import LoadPlan
from holdfast.base.types.reports import LoadReport
from holdfast.core.engine.exchange import TransferStats
from holdfast.core.engine.gc_pause import GcPause, is_small_transfer
from holdfast.core.format.index.index import Index
from holdfast.core.format.index.split_index import SplitIndex
from holdfast.errors import CheckpointError, InvalidError
from holdfast.stored.checkpoint.index_loading import index_for
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.checkpoint.same_content import same_content
from holdfast.stored.leases.reader import ReaderLease
from holdfast.stored.repository.catalog import read_per_rank
from holdfast.training.coordination.absent_ranks import CallWatch
from holdfast.training.coordination.job import Job, error_text
from holdfast.training.loading.exchange import (
    AgreedExchange,
    Offer,
    agree_on_exchange,
    divides_chunks,
    has_files_elsewhere,
    offer_of,
    planned_reads,
    read_or_exchange,
)
from holdfast.training.loading.fill_alone import fill_alone
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.messages import RankStatus, Unfit
from holdfast.training.loading.renamed_catalog import renamed_catalog
from holdfast.training.loading.requirements import (
    filled_bytes,
    filled_regions,
    require_begun_filled,
    require_fitting,
    require_same_call,
    unfit_names,
    warn_of_misfits,
)
from holdfast.training.loading.resolve import Resolved, resolve
from holdfast.training.loading.run_visibility import new_run_line
from holdfast.training.loading.statuses import gather_errors, gather_statuses, names_of
from holdfast.training.loading.step_choice import StepChoice, StepDamage, StepDamaged, raise_or_fall_back
from holdfast.training.loading.viewed_catalog import require_padding, viewed_catalog
from holdfast.training.telemetry.dispatcher import EventDispatcher
from holdfast.training.telemetry.log_lines import loaded_line
from holdfast.training.telemetry.operation import OperationTrace

logger = logging.getLogger(__name__)

_MISSING_NAMED_MAX = 10_000
"""Most names that a rank lists of those that the checkpoint lacks. It counts the others."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded."""

    location: CheckpointLocation
    """Where it is stored."""

    report: LoadReport
    """What the load did."""

    manifest: Manifest
    """Its commit record."""

    index: Index | SplitIndex
    """Its index."""

    filled: Mapping[str, tuple[Box, ...]]
    """What this rank read and checked against digests: boxes by stored FQN. Only of a step: no save refers to another
    checkpoint."""

    newer: tuple[int, ...]
    """Newer steps that exist and were not asked for."""


@dataclass(slots=True)
class LoadAttempt:
    """What the phases of one load share on this rank."""

    job: Job
    """The ranks that load together."""

    home: CheckpointLocation
    """Where checkpoints are stored."""

    choice: StepChoice
    """Chooses the checkpoint."""

    request: LoadRequest
    """What to load and how."""

    trace: OperationTrace
    """Times the phases and sends events."""

    lease: ReaderLease
    """Protects the step from deletion."""

    gc_pause: GcPause
    """Ends early once much data is known to move: the collector has time to run then."""

    watch: CallWatch
    """Finds out which ranks do not load; ends once all ranks do."""

    damage: StepDamage | None = None
    """Why the step before was given up; None for the first."""

    begun: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What a step has begun to fill: elements along each dimension, by FQN. They must not keep values of a damaged one.
    """


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What one rank reads, computed by it alone."""

    catalog: Catalog
    """The content of the checkpoint, under the names of the state."""

    restoration: Restoration
    """What the state wants, and how the load ends."""

    wanted: Sequence[Wanted]
    """The tensors that it wants, by stored name."""

    unfit: tuple[Unfit, ...]
    """Names that cannot take what the checkpoint has."""

    plan: LoadPlan
    """The reads."""

    filled_bytes: int
    """Bytes of this rank's memory that they fill."""

    offer: Offer
    """The reads as other ranks see them."""


@dataclass(frozen=True, slots=True)
class AgreedLoad:
    """What every rank carries out, once all of them can."""

    planned: PlannedLoad
    """This rank's part."""

    exchange: AgreedExchange | None
    """How ranks exchange bytes; None: each reads its own."""

    missing: tuple[str, ...]
    """Names that some rank has and the checkpoint lacks, sorted."""

    unexpected: tuple[str, ...]
    """Names that the checkpoint has and every rank lacks, sorted: a pipeline rank alone lacks most names."""


@contextmanager
def load_attempt(
    job: Job, choice: StepChoice, request: LoadRequest, dispatcher: EventDispatcher | None = None
) -> Iterator[LoadAttempt]:
    """Give a block what `load` takes; release the reader lease and the collector's pause after it.

    The pause outlives `load`, so that the collector never walks the thousands of values that `load` and the block drop.

    Args:
        job: The ranks that load together.
        choice: Where checkpoints are stored, and which one to load.
        request: What and how.
        dispatcher: Receives the events.
    """
    events = dispatcher or EventDispatcher((), job.clock)
    home = choice.home
    trace = OperationTrace("load", home.step, home.url, job.comm, job.clock, events, home.store)
    home = home.for_operation(trace.operation.name, job.comm.rank, job.comm.world_size)
    with (
        GcPause() as gc_pause,
        closing(ReaderLease(job.clock, job.settings.lease_seconds)) as lease,
        CallWatch(job.comm, f"load of {home.url}", "load") as watch,
    ):
        yield LoadAttempt(job, home, choice, request, trace, lease, gc_pause, watch)


def load(attempt: LoadAttempt) -> Loaded | None:
    """Fill a state from a checkpoint, or return None if there is none; a collective of every rank.

    Raises:
        InvalidError: The state does not fit the checkpoint; nothing was changed on any rank.
        MissingError: There is no checkpoint.
        CorruptError: Stored bytes differ from what was saved; the state may be partly filled.
        ConflictError: Files of another system were replaced meanwhile; the state may hold a mix.
    """
    job, choice, trace = attempt.job, attempt.choice, attempt.trace
    documents = [name for layout in attempt.request.layouts for name in layout.documents]
    candidates = choice.candidates(attempt.lease.announce, job.is_first_occurrence)
    while True:
        filling: Restoration | None = None
        try:
            attempt.gc_pause.begin()  # Again after a fallback: the step before may have ended it.
            with trace.phase("resolve"):
                resolved = resolve(job, attempt.home, candidates, attempt.damage, attempt.lease, documents)
            if resolved is None:
                if job.comm.rank == 0:
                    logger.info("%s", new_run_line(attempt.home.store))
                return None
            trace.begin(resolved.manifest.step, resolved.location.url)
            planned = _request_and_plan(attempt, resolved)
            agreed = _agree(attempt, resolved, planned)
            attempt.watch.end()
            filling = agreed.planned.restoration
            moved = _read_or_exchange(attempt, resolved, agreed)
            stats = _restore(attempt, resolved, agreed, moved)
            loaded = _finish(attempt, resolved, agreed, stats)
            choice.settle(job.clock)
            return loaded
        except StepDamaged as damaged:
            attempt.damage = damaged.damage
            if filling is not None:
                attempt.begun |= filled_regions(filling)
            trace.begin_again(damaged.damage.error)
        except BaseException as error:
            _fail(attempt, error)
            raise


def load_checkpoint(job: Job, choice: StepChoice, request: LoadRequest) -> LoadReport:
    """Fill a state from a checkpoint. Errors as `load`.

    Args:
        job: The ranks that load together.
        choice: Which checkpoint; not an empty run.
        request: What to load and how.
    """
    with load_attempt(job, choice, request) as attempt:
        loaded = load(attempt)
        assert loaded is not None, "a location was chosen"
        report = loaded.report
        del loaded  # Dropped before the collector runs again: its index may have thousands of values.
    return report


def _require_same_discarding(attempt: LoadAttempt, resolved: Resolved) -> None:
    if resolved.chosen.discards is not attempt.choice.discards:
        raise InvalidError(
            f"load of step {resolved.manifest.step}: discard_newer={attempt.choice.discards} here, and "
            f"{resolved.chosen.discards} on rank 0; expected the same on every rank. Nothing was removed"
        )


def _request_and_plan(attempt: LoadAttempt, resolved: Resolved) -> PlannedLoad | Exception:
    """Return this rank's reads, or why it cannot load: the other ranks wait for its status in either case."""
    job, request, location = attempt.job, attempt.request, resolved.location
    try:
        with attempt.trace.phase("plan"):
            _require_same_discarding(attempt, resolved)
            stored, selection, viewed = _catalog(resolved, job), request.selection, None
            if request.layouts:
                viewed = viewed_catalog(stored, request.layouts, resolved.chosen.documents, location.url)
            renamed = renamed_catalog(stored if viewed is None else viewed.catalog, request.rename, location.url)
            padded = viewed.named_padded(renamed.stored) if viewed is not None else {}
            if padded:
                selection = replace(selection, partial=(*selection.partial, *map(glob.escape, padded)))
            restoration = job.framework.restoration(request.state, renamed.catalog, selection)
            if padded:
                require_padding(restoration.partly, padded, request.selection.partial)
            warn_of_misfits(job, restoration.misfits, location.url, strict=request.strict)
            wanted = renamed.as_stored(restoration.wanted) if request.rename.rules else restoration.wanted
            wanted = wanted if viewed is None else viewed.as_stored(wanted)
            for tensor in wanted:
                resolved.require_stored(tensor.stored_fqn)
            boxes = ((tensor.stored_fqn, box) for tensor in wanted for box in tensor.boxes)
            index = index_for(resolved.index, boxes, job.clock, location)
            unfit = unfit_names(restoration, wanted, index.tensors, strict=request.strict, cast=request.selection.cast)
            plan = planned_reads(wanted, index, job)
            count = filled_bytes(restoration, wanted, plan)
            require_begun_filled(attempt.begun, restoration, location.url, strict=request.strict)
            offer = offer_of(plan, resolved.manifest, job.settings, job.comm.world_size)
            return PlannedLoad(renamed.catalog, restoration, wanted, unfit, plan, count, offer)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
        return error


def _catalog(resolved: Resolved, job: Job) -> Catalog:
    location, manifest, index = resolved.location, resolved.manifest, resolved.index
    return Catalog(
        tensors=index.tensors,
        aliases=manifest.aliases,
        tree=manifest.tree,
        run_id=manifest.run_id,
        step=manifest.step,
        world_size=manifest.world_size,
        per_rank=lambda rank: read_per_rank(location.store, location.folder, manifest, rank),
        same_content=partial(same_content, index, location.packs_of(manifest), job.settings, job.codecs),
        fill=partial(fill_alone, job, resolved),
        optimizers=manifest.optimizers,
        masters=manifest.masters,
        drops_ties=manifest.origin is not None,
        require_stored=resolved.require_stored,
    )


def _agree(attempt: LoadAttempt, resolved: Resolved, planned: PlannedLoad | Exception) -> AgreedLoad:
    """Return what all ranks carry out; raise on every rank if any cannot load. A collective."""
    comm, request, url = attempt.job.comm, attempt.request, resolved.location.url
    with attempt.trace.phase("agree"):
        own, catalog = (planned, None) if isinstance(planned, Exception) else (None, planned.catalog)
        names = partial(names_of, catalog.tensors, catalog.aliases, catalog.tree) if catalog is not None else tuple
        gathered = gather_statuses(comm, _status_of(planned, request), names)
        statuses = gathered.by_rank
        raise_or_fall_back([status.error for status in statuses], comm.rank, own, falls_back=attempt.choice.falls_back)
        assert not isinstance(planned, Exception), "an error on any rank has been raised"
        require_same_call(gathered.calls, url)
        error, warnings = judge_unmatched(url, [each.unmatched for each in statuses])
        if error is not None:
            raise error
        for text in warnings:
            attempt.job.warn_once(url, text)
        missing = sorted(gathered.missing.union(planned.restoration.missing))
        require_fitting(gathered, missing, request.state, planned.catalog, url, strict=request.strict)
        exchange = _exchange_of(attempt, resolved.manifest, planned.plan, [status.offer for status in statuses])
        return AgreedLoad(planned, exchange, tuple(missing), tuple(sorted(gathered.unexpected)))


def _status_of(planned: PlannedLoad | Exception, request: LoadRequest) -> RankStatus:
    if isinstance(planned, Exception):
        return RankStatus(error_text(planned))
    restoration = planned.restoration
    missing = sorted({*restoration.missing})
    named, unnamed = tuple(missing[:_MISSING_NAMED_MAX]), len(missing[_MISSING_NAMED_MAX:])
    return RankStatus(
        missing=named,
        unnamed=unnamed,
        unexpected=tuple(restoration.unexpected),
        # A layout adds tensors with padding to `partial`; the caller did not name those.
        unmatched=tuple(
            [u for u in restoration.unmatched if u.argument != "partial" or u.pattern in request.selection.partial]
        ),
        unfit=planned.unfit,
        call=request.call,
        fills=restoration.fills_any or bool(restoration.misfits) or (bool(restoration.skipped) and not missing),
        offer=planned.offer,
    )


def _exchange_of(
    attempt: LoadAttempt, manifest: Manifest, plan: LoadPlan, offers: list[Offer]
) -> AgreedExchange | None:
    """Return the exchange that follows from all offers, if any; a collective if there is one.

    If any rank cannot compute it, every rank raises before the first round. A rank that fails here
    cannot know whether the others exchange bytes, so it joins one gather of errors. If the others do not exchange,
    their next gather of errors receives its error. Both carry the same message.
    """
    exchange, own = None, None
    may_share_bytes = divides = False
    try:
        exchange = agree_on_exchange(offers)
        if exchange is not None and has_files_elsewhere(manifest):
            may_share_bytes, divides = True, divides_chunks(exchange, plan, manifest)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
        own = error
    if exchange is not None or own is not None:
        _raise_together(attempt, own)
    # A rank sees the chunks of its own reads only, so any rank may find one that cannot be exchanged.
    if may_share_bytes and any(attempt.job.comm.bitwise_or(bytes([divides]))):
        return None
    return exchange


def _raise_together(attempt: LoadAttempt, own: Exception | None) -> None:
    """Raise on every rank if any rank failed; a collective."""
    comm = attempt.job.comm
    errors = gather_errors(comm, None if own is None else error_text(own))
    raise_or_fall_back(errors, comm.rank, own, falls_back=attempt.choice.falls_back)


def _read_or_exchange(attempt: LoadAttempt, resolved: Resolved, agreed: AgreedLoad) -> TransferStats | Exception:
    """Fill this rank's tensors; return what moved, or the error, for `_restore` to share. From here values change."""
    trace, plan, wanted = attempt.trace, agreed.planned.plan, agreed.planned.wanted
    try:
        if not is_small_transfer(plan.bytes):
            attempt.gc_pause.end()
        started = trace.begin_phase("exchange" if agreed.exchange is not None else "read")
        moved = read_or_exchange(
            attempt.job,
            plan,
            agreed.exchange,
            resolved.manifest,
            resolved.location.packs_of(resolved.manifest),
            [tensor.target for tensor in wanted],
            trace.progress_callback(plan.bytes),
        )
        if moved.exchanging_seconds:
            trace.add_phase("exchange", started, started + moved.exchanging_seconds)
        trace.add_phase("read", started + moved.exchanging_seconds, trace.seconds)
        return moved
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
        return error


def _restore(
    attempt: LoadAttempt, resolved: Resolved, agreed: AgreedLoad, moved: TransferStats | Exception
) -> TransferStats:
    """Put back what is not a tensor, and return once every rank has; raise on every rank if any failed."""
    trace = attempt.trace
    own = moved if isinstance(moved, Exception) else None
    if attempt.choice.falls_back or not resolved.manifest.attempt:
        # Not before every rank has verified its tensors: values of a step that another rank finds damaged must not
        # stay in the state. Files of another system have no digests: they must not change before all are read.
        with trace.phase("wait"):
            _raise_together(attempt, own)
    if isinstance(moved, TransferStats) and moved.whole:
        try:
            with trace.phase("restore"):
                resolved.require_unchanged()
                agreed.planned.restoration.finish()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, whatever the error is
            own = error
    with trace.phase("wait"):
        _raise_together(attempt, own)
    assert isinstance(moved, TransferStats), "an error on any rank has been raised"
    return moved


def _finish(attempt: LoadAttempt, resolved: Resolved, agreed: AgreedLoad, stats: TransferStats) -> Loaded:
    """Report the load to events, log and storage, and return it."""
    job, trace, restoration = attempt.job, attempt.trace, agreed.planned.restoration
    location, manifest = resolved.location, resolved.manifest
    counts = trace.retry_counts
    report = LoadReport(
        step=manifest.step,
        loaded=tuple(tensor.fqn for tensor in restoration.wanted),
        missing=agreed.missing,
        unexpected=agreed.unexpected,
        skipped=tuple(dict.fromkeys(restoration.skipped)),
        partial=tuple(restoration.partly),
        bytes=stats.read_bytes,
        exchanged_bytes=stats.received_bytes,
        tensors=len(restoration.held),
        tensor_bytes=sum(restoration.held.values()),
        loaded_bytes=agreed.planned.filled_bytes,
        seconds=trace.seconds,
        passed_over=resolved.chosen.passed_over,
        phases=trace.phases,
        retries=counts.retries,
        retry_seconds=counts.seconds,
        throttled=counts.throttled,
        sources=trace.sources(stats.sources),
    )
    # Nothing is written beside another system's checkpoint, which has no attempt.
    store = location.store if job.settings.reports and manifest.attempt else None
    trace.end(report, resolved.chosen.reader_id, store, location.folder, job.node_reports)
    if job.comm.rank == 0:
        logger.info("%s", loaded_line(report, location.url, job.comm.world_size))
    # What a layout made is not stored: the next save has nothing to refer to.
    is_stored = location.root is not None and not attempt.request.layouts
    filled = {tensor.stored_fqn: tensor.boxes for tensor in agreed.planned.wanted} if is_stored else {}
    return Loaded(location, report, manifest, resolved.index, filled, resolved.chosen.newer)


def _fail(attempt: LoadAttempt, error: BaseException) -> None:
    """Report the failure; after a fallback, say that the damaged step may have left values."""
    if attempt.damage is not None and isinstance(error, InvalidError):
        error.add_note(
            "the state may be partly filled from a newer step that turned out damaged, or from a checkpoint that was "
            f"overwritten: {attempt.damage.error}"
        )
    attempt.trace.fail(error)
    if isinstance(error, CheckpointError):
        attempt.choice.settle(attempt.job.clock)
