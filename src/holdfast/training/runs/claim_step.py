"""The agreement on a save, on rank 0: who may write, whether the step is free.

The first save after a start or a load asks storage for all of it: `claim_step`. Only the holder of the newest epoch
changes what it learns. So the saves after it ask once, whether the step is unused. The committing rank looks before it
publishes at what may have changed all the same: docs/decisions/072-few-round-trips.md has each look with its reason.

States of `RunFacts`, and who moves it on:

    unknown -> known     rank 0, once `claim_step` has returned
    known   -> unknown   a save failed, or a load put a record of a timeline. A load, and the loss of the writer lease,
                         are noticed by `known`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.clock import Clock, utc_now_text
from holdfast.base.ports.store import Store
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.publishing.making_room import has_made_room, require_not_moved
from holdfast.stored.repository.catalog import ensure_run
from holdfast.stored.repository.epochs import declare_timelines
from holdfast.stored.repository.near_tier import ensure_near, record_near
from holdfast.stored.repository.quarantine import list_records
from holdfast.stored.repository.timeline_records import TimelineRecord, ensure_record
from holdfast.stored.repository.timelines import run_timelines
from holdfast.stored.repository.two_roots import TwoRoots
from holdfast.training.coordination.save_context import Base, SaveContext


@dataclass(frozen=True, slots=True)
class KnownRun:
    """What stays true of a run while this process holds the writer lease, and loads nothing."""

    run_id: str
    """The run."""

    epoch: int
    """Epoch of the lease."""

    timeline: Timeline
    """Timeline of the saves."""

    loads: int
    """How often this process had loaded."""

    base: Base | None
    """The base step that was looked at; None if none was."""


class RunFacts:
    """What rank 0 knows before the next save. Any thread may call: the known facts are replaced as a whole."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: KnownRun | None = None
        self._learnt: KnownRun | None = None
        """As known, also after a failed save: what a save into another place needs stays true."""

    def known(self, writer_lease: WriterLease, loads: int) -> KnownRun | None:
        """Return what is known; None if it has to be asked for.

        Args:
            writer_lease: The lease of this process. A handle that is kept for long refers to this object: it must not
                keep the lease.
            loads: How often this process has loaded by now.
        """
        return self._still(self._known, writer_lease, loads)

    def learnt(self, writer_lease: WriterLease, loads: int) -> KnownRun | None:
        """Return run, epoch and timeline, as `known` does; also after a failed save."""
        return self._still(self._learnt, writer_lease, loads)

    def _still(self, known: KnownRun | None, writer_lease: WriterLease, loads: int) -> KnownRun | None:
        if known is None or known.loads != loads or known.epoch != writer_lease.epoch or writer_lease.is_lost:
            return None
        return known

    @property
    def has_one_timeline(self) -> bool:
        """Whether the run is known to have never gone back. Then no load has discarded a step."""
        known = self._known
        return known is not None and known.timeline == FIRST_TIMELINE

    def learn(self, known: KnownRun) -> None:
        """Take what a whole look has found."""
        self._known = self._learnt = known

    def forget(self) -> None:
        """Ask for everything at the next save: one has failed, or this process has put a record of a timeline."""
        self._known = None


def is_unused(location: CheckpointLocation) -> bool:
    """Return whether nothing is stored in the folder of a step.

    One request. What is stored there after it is of this process, or of a writer whose epoch is over.
    """
    return next(iter(location.store.list(location.folder)), None) is None


def claim_step(
    location: CheckpointLocation,
    writer_lease: WriterLease,
    clock: Clock,
    timeline_of_save: Callable[[int], Timeline] | None = None,
    suspects_in: Callable[[Sequence[tuple[int, str]]], Iterable[int]] | None = None,
    *,
    run: Store | None = None,
    why: str = "",
    may_be_copy: bool = True,
) -> SaveContext:
    """Take the writer lease and make room for a step. A root without a run becomes the root of a new run.

    Args:
        location: The step.
        writer_lease: The lease of the run.
        clock: The time, and randomness.
        timeline_of_save: Returns the timeline of the step, given the epoch; None for the newest one.
        suspects_in: Returns the suspect steps, given the names of the records of quarantine; None: nobody asks.
        run: The near tier and the root as one, if the step goes into one of the two; None: the store of the step.
        why: Why a step that is there is not finished as it is; empty if that is no question.
        may_be_copy: Whether to look for an unfinished copy of a run at a root without a run.
    Raises:
        ConflictError: A checkpoint is there, or another job writes to this root, or it is that of an unfinished copy.
        InvalidError: The root holds steps, and the manager has loaded none of them.
    """
    store = location.store
    run = store if run is None else run
    new_id, now = clock.random_bytes(8).hex(), f"{clock.unix_seconds():.0f}"
    if isinstance(run, TwoRoots):
        run_id = ensure_near(run, new_id, now)
    else:
        run_id = ensure_run(store, new_id, now, may_be_copy=may_be_copy)
    epoch = writer_lease.hold(run_id)
    if isinstance(run, TwoRoots):
        record_near(run)
    timeline = run_timelines(run).newest if timeline_of_save is None else timeline_of_save(epoch)
    if timeline.number > 1:
        declare_timelines(run, epoch, timeline)
        if isinstance(run, TwoRoots):
            # The near tier may be lost before the root has a step that states the timeline.
            ensure_record(run, TimelineRecord(timeline, epoch))
    is_free = is_unused(location)
    records = list_records(store) if suspects_in is not None or not is_free else []
    require_not_moved(location, timeline)
    if not is_free and not has_made_room(location, timeline, epoch, records):
        location.require_empty(why=why)
    return SaveContext(
        run_id=run_id,
        created=utc_now_text(clock),
        epoch=epoch,
        timeline=timeline,
        suspect_steps=frozenset(suspects_in(records) if suspects_in is not None else ()),
    )
