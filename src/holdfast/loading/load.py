"""One load: resolved by one rank, planned by each, agreed by all before a value changes."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.checkpoint.coverage import RequireStored
from holdfast.checkpoint.index_loading import index_for
from holdfast.checkpoint.location import CheckpointLocation
from holdfast.checkpoint.per_rank import per_rank_values
from holdfast.coordination.job import Job, error_text, raise_together
from holdfast.engine.exchange import TransferStats
from holdfast.engine.gc_pause import GcPause, is_small_transfer
from holdfast.errors import CheckpointError, CorruptError, InvalidError
from holdfast.format.digest import short_digest_of
from holdfast.format.index.index import Index
from holdfast.format.index.split_index import SplitIndex
from holdfast.geometry.box import Box
from holdfast.geometry.dtype import DTYPES
from holdfast.leases.reader import ReaderLease, reader_lease
from holdfast.loading.exchange import Agreed, Offer, agreed_on, carried_out, offer_of
from holdfast.loading.resolve import resolve
from holdfast.loading.same_content import same_content
from holdfast.loading.step_choice import ExactStep, StepDamage, StepSelector, damage_in
from holdfast.plan.reads import load_plan
from holdfast.ports.comm import Comm
from holdfast.ports.framework import Catalog, Restoration, Selection
from holdfast.settings import Settings
from holdfast.telemetry.dispatcher import EventDispatcher
from holdfast.telemetry.operation import OperationTrace
from holdfast.types.manifest import Manifest
from holdfast.types.plan import LoadPlan
from holdfast.types.reports import LoadReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load and how."""

    state: Mapping[str, object]
    """The state to fill."""

    selection: Selection
    """Names that take part."""

    strict: bool
    """Whether missing or unexpected names are an error."""

    cast: bool
    """Whether a tensor may be filled from another dtype."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded."""

    location: CheckpointLocation
    """Where it lies."""

    report: LoadReport
    """What the load did."""

    manifest: Manifest
    """Its commit record."""

    index: Index | SplitIndex
    """Its index."""

    filled: Mapping[str, tuple[Box, ...]]
    """What was read of it for this rank and had its digests: boxes by stored FQN."""

    newer: tuple[int, ...]
    """Newer steps that exist and were not asked for."""


def load(
    job: Job,
    home: CheckpointLocation,
    choice: StepSelector,
    request: LoadRequest,
    pause: GcPause,
    dispatcher: EventDispatcher | None = None,
) -> Loaded | None:
    """Fill a state from a checkpoint; a collective of every rank.

    Args:
        job: The ranks that load together.
        home: Where checkpoints lie, on every rank.
        choice: Asked on rank 0 for the place there to load from.
        request: What and how.
        pause: Holds the collector off until it is known that much data moves; the caller ends it once what was made for
            thousands of tensors is gone again, so that it is never walked.
        audience: Who hears of it.
    Returns:
        What was loaded, or None if there was nothing to load.
    Raises:
        InvalidError: The state does not fit the checkpoint; nothing was changed on any rank.
        MissingError: There is no checkpoint.
        CorruptError: Stored bytes are not what was saved; the state may be partly filled.
    """
    wrong: StepDamage | None = None
    filling: set[str] = set()
    trace = OperationTrace(
        "load", home.step, home.url, job.comm, job.clock, dispatcher or EventDispatcher((), job.clock)
    )
    with reader_lease(job.clock, job.settings.lease_seconds) as lease:
        while True:
            try:
                pause.begin()
                done = _load(job, home, choice, request, pause, wrong, trace, lease, filling)
                choice.settle()
                return done
            except _Damaged as damaged:
                wrong = damaged.damage
                trace.begin_again(wrong.error)
            except BaseException as error:
                if wrong is not None and isinstance(error, InvalidError):
                    error.add_note(
                        f"the state may be partly filled from a newer step that turned out damaged: {wrong.error}"
                    )
                trace.fail(error)
                if isinstance(error, CheckpointError):
                    choice.settle()
                raise


class _Damaged(Exception):
    """Every rank knows that what it began to load is damaged, and that another is to be tried."""

    def __init__(self, damage: StepDamage) -> None:
        super().__init__(str(damage.error))
        self.damage = damage


def _load(
    job: Job,
    home: CheckpointLocation,
    choice: StepSelector,
    request: LoadRequest,
    pause: GcPause,
    wrong: StepDamage | None,
    trace: OperationTrace,
    lease: ReaderLease,
    filling: set[str],
) -> Loaded | None:
    comm, clock, settings, framework = job.comm, job.clock, job.settings, job.framework
    with trace.phase("resolve"):
        resolved = resolve(comm, clock, home, choice, wrong, lease)
    if resolved is None:
        return None
    location, manifest, stored = resolved.location, resolved.manifest, resolved.index
    trace.begin(manifest.step, location.url)
    restoration, plan, loaded_bytes, offer, own = None, LoadPlan(()), 0, Offer(), None
    try:
        with trace.phase("plan"):
            catalog = _catalog(location, manifest, stored, resolved.require_stored, settings)
            restoration = framework.restoration(request.state, catalog, request.selection)
            for wanted in restoration.wanted:
                resolved.require_stored(wanted.stored_fqn)
            boxes = [(each.stored_fqn, box) for each in restoration.wanted for box in each.boxes]
            index = index_for(stored, boxes, clock, location)
            plan = _plan(restoration, index, request, settings)
            loaded_bytes = _filled_bytes(restoration, plan)
            offer = offer_of(plan, manifest, settings, comm.world_size)
            if not request.strict:
                _require_filled(filling, restoration, location)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        own = error
    with trace.phase("agree"):
        missing, unexpected, offers, id = _agree(comm, choice, restoration, offer, own)
        if request.strict and (missing or unexpected):
            _require_complete(missing, unexpected, location, {*stored.tensors, *manifest.aliases})
        assert restoration is not None, "a failure on any rank has been raised by now"
        agreed = _exchange_of(comm, choice, offers)
        del offers
    targets = [wanted.target for wanted in restoration.wanted]
    own, moved = None, TransferStats(0, 0)
    filling.update(wanted.fqn for wanted in restoration.wanted)
    try:
        if not is_small_transfer(plan.bytes):
            pause.end()
        begun, told = trace.enter("exchange" if agreed is not None else "read"), trace.progress_callback(plan.bytes)
        moved = carried_out(plan, agreed, manifest, comm, clock, location.packs_of(manifest), targets, settings, told)
        if moved.exchanging_seconds:
            trace.note("exchange", begun, begun + moved.exchanging_seconds)
        trace.note("read", begun + moved.exchanging_seconds, trace.seconds)
        if moved.whole and not choice.falls_back:
            with trace.phase("restore"):
                restoration.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        own = error
    with trace.phase("wait"):
        _fail_together(comm, own, choice)
    if choice.falls_back:
        # Not before every rank has all of it: values of a step that another rank finds damaged must not stay.
        with trace.phase("restore"):
            own = _finished(restoration)
        with trace.phase("wait"):
            _fail_together(comm, own, choice)
    report = LoadReport(
        step=manifest.step,
        loaded=tuple(wanted.fqn for wanted in restoration.wanted),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        skipped=tuple(dict.fromkeys(restoration.skipped)),
        bytes=moved.read_bytes,
        exchanged_bytes=moved.received_bytes,
        tensors=len(restoration.held),
        tensor_bytes=sum(restoration.held.values()),
        loaded_bytes=loaded_bytes,
        seconds=trace.seconds,
        passed_over=resolved.passed_over,
        phases=trace.phases,
    )
    # Of another system's checkpoint nothing of ours is left beside it.
    trace.end(report, id, location.store if settings.reports and manifest.attempt else None, location.folder)
    if comm.rank == 0:
        message = "loaded %s: %d tensors, %d bytes in %.2f s"
        logger.info(message, location.url, len(report.loaded), report.bytes, report.seconds)
    filled = {wanted.stored_fqn: wanted.boxes for wanted in restoration.wanted}
    return Loaded(location, report, manifest, stored, filled, resolved.newer)


def load_checkpoint(job: Job, location: CheckpointLocation, request: LoadRequest) -> LoadReport:
    """Fill a state from the one checkpoint at a place. Arguments and errors as `load`."""
    with GcPause() as pause:
        done = load(job, location, ExactStep(lambda: location), request, pause)
        assert done is not None, "a place was chosen"
        report = done.report
        del done
    return report


def _catalog(
    location: CheckpointLocation,
    manifest: Manifest,
    index: Index | SplitIndex,
    require_stored: RequireStored,
    settings: Settings,
) -> Catalog:
    return Catalog(
        tensors=index.tensors,
        aliases=manifest.aliases,
        tree=manifest.tree,
        run_id=manifest.run_id,
        step=manifest.step,
        world_size=manifest.world_size,
        per_rank=lambda rank: per_rank_values(location.store, location.folder, manifest, rank),
        same_content=partial(same_content, index, location.packs_of(manifest), settings),
        masters=manifest.masters,
        drops_ties=manifest.origin is not None,
        require_stored=require_stored,
    )


def _plan(restoration: Restoration, index: Index, request: LoadRequest, settings: Settings) -> LoadPlan:
    """Return the reads.

    Raises:
        InvalidError: A target has another dtype than was saved.
    """
    if not request.cast:
        differing = [
            f"{each.fqn} ({index.tensors[each.stored_fqn].dtype} saved, {each.dtype} wanted)"
            for each in restoration.wanted
            if index.tensors[each.stored_fqn].dtype != each.dtype
        ]
        if differing:
            raise InvalidError(
                f"{len(differing)} tensors have another dtype than was saved: {', '.join(differing[:20])}. "
                "Expected the same; pass cast=True to convert"
            )
    return load_plan(restoration.wanted, index.pieces_near, settings.read_window_bytes)


def _require_filled(filling: Collection[str], restoration: Restoration, location: CheckpointLocation) -> None:
    """Refuse a step that leaves what a newer one, which turned out damaged, had begun to fill.

    Raises:
        InvalidError: Names it.
    """
    left = sorted({*filling} & {*restoration.missing})
    if left:
        raise InvalidError(
            f"{location.url}: lacks {len(left)} names that a newer step had begun to fill before it turned out "
            f"damaged: {', '.join(left[:20])}. They would keep values of the damaged step; expected that every name "
            "gets those of one step. Make the state anew and load again: the damaged step is passed over then"
        )


def _filled_bytes(restoration: Restoration, plan: LoadPlan) -> int:
    """Return the bytes of this rank's memory that a plan fills, all of what is held and not missing.

    What is held is measured on memory, what is filled on the plan, so neither side's mistake hides itself.

    Raises:
        InvalidError: They differ.
    """
    itemsizes = [DTYPES[each.dtype].itemsize for each in restoration.wanted]
    parts = (part for run in plan.runs for chunk in run.chunks for part in chunk.parts)
    filled = sum(part.box.numel * itemsizes[part.wanted_number] for part in parts)
    missing = set(restoration.missing)
    held = sum(count for fqn, count in restoration.held.items() if fqn not in missing)
    if held != filled:
        raise InvalidError(
            f"the state holds {held} bytes of tensors that the checkpoint has, and the plan fills {filled}; expected "
            "the same. Nothing was changed. This is a fault in Holdfast: report it"
        )
    return filled


def _finished(restoration: Restoration) -> Exception | None:
    """Put back what is not a tensor; return what went wrong."""
    try:
        restoration.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        return error
    return None


def _agree(
    comm: Comm, choice: StepSelector, restoration: Restoration | None, offer: Offer, own: Exception | None
) -> tuple[list[str], list[str], list[bytes], str]:
    """Return what is missing on any rank, what is unexpected on every rank, every rank's offer, encoded, and an id.

    A rank of a pipeline holds few of the names: only what no rank expects is unexpected. Raises if any rank cannot
    load.
    """
    status = {
        "error": error_text(own) if own else None,
        "missing": list(restoration.missing) if restoration else [],
        "unexpected": list(restoration.unexpected) if restoration else [],
        # The same for the same reader: an evaluation that loads for ever leaves the report of its last time alone.
        "id": short_digest_of(platform.node().encode(), str(comm.world_size).encode()).hex(),
    }
    said = [
        msgspec.msgpack.decode(each, type=list[bytes])
        for each in comm.all_gather(msgspec.msgpack.encode([json.dumps(status).encode(), offer.encoded()]))
    ]
    statuses = [json.loads(text) for text, _ in said]
    _raise_together([each["error"] for each in statuses], comm.rank, own, choice)
    missing = sorted({name for each in statuses for name in each["missing"]})
    unexpected = set(statuses[0]["unexpected"]).intersection(*(each["unexpected"] for each in statuses))
    return missing, sorted(unexpected), [bytes(each) for _, each in said], statuses[0]["id"]


def _exchange_of(comm: Comm, choice: StepSelector, offers: Sequence[bytes]) -> Agreed | None:
    """Return the exchange that the offers come to, if any; a collective where there is one.

    Raises on every rank if any of them cannot plan it, before the first round. Such a rank does not know whether the
    others have an exchange: what it says is understood both here and, where they have none, at the end of the load.
    """
    agreed, own = None, None
    try:
        agreed = agreed_on([Offer.decoded(each) for each in offers])
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        own = error
    if agreed is not None or own is not None:
        _fail_together(comm, own, choice)
    return agreed


def _fail_together(comm: Comm, own: Exception | None, choice: StepSelector) -> None:
    """Raise on every rank if any rank failed; a collective."""
    statuses = comm.all_gather(error_text(own).encode() if own else b"")
    _raise_together([text.decode() or None for text in statuses], comm.rank, own, choice)


def _raise_together(statuses: Sequence[str | None], rank: int, own: Exception | None, choice: StepSelector) -> None:
    """Raise on every rank if any rank failed: `_Damaged` on all of them where another step is to be tried."""
    try:
        raise_together(statuses, rank, own)
    except CorruptError as error:
        damage = damage_in(error, statuses) if choice.falls_back else None
        if damage is not None:
            raise _Damaged(damage) from error
        raise


def _require_complete(
    missing: Sequence[str], unexpected: Sequence[str], location: CheckpointLocation, stored: Collection[str]
) -> None:
    said = []
    for kind, names in (("missing from the checkpoint", missing), ("unexpected in the checkpoint", unexpected)):
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            said.append(f"{len(names)} {kind}: {', '.join(names[:20])}{more}")
    advice = "pass strict=False to load what matches, or only=/skip= to choose"
    gradients = [name for name in unexpected if name.endswith(".grad") and name.removesuffix(".grad") in stored]
    if unexpected and len(gradients) == len(unexpected) and not missing:
        advice = "it was saved with gradients: pass grads=True to go on with them, or skip='*.grad' to do without"
    raise InvalidError(
        f"{location.url}: the state and the checkpoint differ: {'; '.join(said)}. Nothing was changed. "
        f"Expected the same names; {advice}"
    )
