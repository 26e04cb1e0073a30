"""The request to save one step of a run: writer lease, pins, metrics, tags and lineage."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from holdfast.checkpoint.location import CheckpointLocation
from holdfast.clock import Clock, utc_now_text
from holdfast.coordination.job import Job
from holdfast.coordination.save_context import SaveContext
from holdfast.engine.write import PackWriter
from holdfast.leases.writer import WriterLease
from holdfast.ports.framework import Collected, Selection
from holdfast.ports.store import Store
from holdfast.repository.catalog import ensure_run, manifest_digest
from holdfast.repository.quarantine import supersede
from holdfast.repository.removal import marks
from holdfast.runs.garbage_collection import Background, Pins
from holdfast.runs.step_metrics import WantedMetrics, checked_metrics
from holdfast.runs.suspect_steps import SuspectSteps
from holdfast.runs.tags import checked_tags, require_all_free, tag_saved
from holdfast.saving.commit import clear_fenced
from holdfast.saving.deduplication import BaseStep, Deduplicator
from holdfast.types.manifest import Parent

logger = logging.getLogger(__name__)


class LastCommitted:
    """The last committed step that this rank saved or loaded, as the base of the next save."""

    def __init__(self) -> None:
        """Start without a step."""
        self.base: BaseStep | None = None
        """The step. Set by the commit thread, and by loads."""


@dataclass(frozen=True, slots=True)
class RunParts:
    """Resources that all saves of a run share."""

    job: Job
    """The ranks."""

    store: Store
    """The root of the run."""

    writer: PackWriter
    """Writes packs below the root."""

    writer_lease: WriterLease
    """The right to write to the root."""

    last_committed: LastCommitted
    """The base step of the next save."""

    pins: Pins
    """Steps that garbage collection must leave alone."""

    metrics: WantedMetrics
    """Metrics that the retention policy ranks by."""

    suspect_steps: SuspectSteps
    """Steps whose packs may be damaged."""

    collecting: Background | None
    """Garbage collection on rank 0; None on other ranks, and without a policy."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Arguments that the training loop passes for one step."""

    state: Mapping[str, object]
    """The state."""

    selection: Selection
    """Names of the state that are saved."""

    metrics: Mapping[str, object] | None = None
    """Metrics as passed, not checked yet."""

    tags: Iterable[str] | str = ()
    """Tags as passed, not checked yet."""

    is_last: bool = False
    """Whether the job ends after this save. Then metrics that the policy ranks by may be missing."""

    def as_last(self) -> StepState:
        """Return a copy for the last save of the job."""
        return replace(self, is_last=True)


class StepRequest:
    """A `SaveRequest` for one step of a run."""

    def __init__(self, parts: RunParts, location: CheckpointLocation, passed: StepState, lineage: Lineage) -> None:
        """Do nothing yet.

        Args:
            parts: Resources of the run.
            location: Where the step goes.
            passed: Arguments of the training loop.
            lineage: The checkpoint, or the save in flight, that this one continues.
        """
        assert location.step is not None, "a run saves steps"
        self._parts, self._passed, self._continued = parts, passed, lineage
        self.location, self._step, self._base = location, location.step, parts.last_committed.base
        self.writer = parts.writer
        self.deduplicator = Deduplicator(location, self._base, parts.writer, parts.job.settings)
        self.lineage = Lineage(None, lineage)
        """The lineage that the next save continues: this save."""
        self._metrics: dict[str, float] = {}
        self._tags: tuple[str, ...] = ()

    def collect(self) -> Collected:
        """Check metrics and tags, and take the state apart. An error here on one rank refuses the save on all."""
        self._metrics = checked_metrics(self._passed.metrics)
        self._tags = checked_tags(self._passed.tags)
        passed = self._passed
        # The handle of a save that fails in the background may be kept for long: it must not keep the state alive.
        self._passed = replace(passed, state={})
        return self._parts.job.framework.collect(passed.state, passed.selection)

    def claim(self) -> SaveContext:
        """Take the writer lease, free the step, and pin it and its base against garbage collection."""
        parts = self._parts
        if not self._passed.is_last:
            parts.metrics.require_in(self._metrics)
        require_all_free(parts.store, self._tags)
        has_base = self._pin()
        context = claim_step(self.location, parts.writer_lease, parts.job.clock)
        return replace(
            context,
            base=self._base.identity if has_base and self._base is not None else None,
            suspect_steps=frozenset(parts.suspect_steps.steps()) if has_base else frozenset(),
            metrics=self._metrics,
        )

    def parent(self) -> Parent | None:
        """Return the newest committed checkpoint that this save continues."""
        return self._continued.parent()

    def committed(self, context: SaveContext, manifest_digest: str) -> None:
        """Record this step as parent and base of later saves; on rank 0, tag it and request garbage collection."""
        parts = self._parts
        self.lineage.commit(Parent(context.run_id, self._step, manifest_digest))
        parts.last_committed.base = self.deduplicator.committed(manifest_digest)
        if parts.job.comm.rank == 0:
            tag_saved(parts.store, parts.job.clock, self._step, self._tags)
            parts.pins.unpin(self._step, is_committed=True)
            if not parts.pins.has_gone_back:
                parts.pins.current_step = self._step
            if parts.collecting is not None:
                parts.collecting.want()

    def _pin(self) -> bool:
        """Pin the step and its base; return whether the base is still there."""
        store, base = self._parts.store, None if self._base is None else self._base.identity
        if not self._parts.pins.pin(self._step, None if base is None else base[0]) or base is None:
            return False
        # Check after the pin: before it took the writer lease, another process may have removed the base.
        if manifest_digest(store, base[0]) != base[1]:
            return False
        return not any(base[0] in mark.steps for mark in marks(store) if mark.is_carried_out)


class Lineage:
    """A point in the history of a run: a checkpoint, or a save in flight and the point before it."""

    def __init__(self, checkpoint: Parent | None, previous: Lineage | None) -> None:
        """Make a point.

        Args:
            checkpoint: The checkpoint; None for a save in flight, and for the start of a run.
            previous: The point that the save continues.
        """
        self._checkpoint, self._previous = checkpoint, previous

    def parent(self) -> Parent | None:
        """Return the newest checkpoint at or before this point. Call it once all earlier saves have ended."""
        point: Lineage | None = self
        while point is not None and point._checkpoint is None:
            point = point._previous
        return point._checkpoint if point is not None else None

    def commit(self, checkpoint: Parent) -> None:
        """Record the checkpoint of the save in flight, and drop the earlier points: a chain must not grow forever."""
        self._checkpoint, self._previous = checkpoint, None


def claim_step(location: CheckpointLocation, writer_lease: WriterLease, clock: Clock) -> SaveContext:
    """Take the writer lease and make room for a step. A root without a run becomes the root of a new run.

    Raises:
        ConflictError: A checkpoint is there, or another job writes to this root.
    """
    run_id = create_or_read_run_id(location.store, clock)
    epoch = writer_lease.hold(run_id)
    if location.step is not None and supersede(location.store, location.step):
        logger.warning(
            "step %d: its damaged manifest is moved to quarantine, and the step is saved anew", location.step
        )
    if not clear_fenced(location, epoch):
        location.require_empty()
    return SaveContext(run_id=run_id, created=utc_now_text(clock), epoch=epoch)


def create_or_read_run_id(store: Store, clock: Clock) -> str:
    """Return the run id of a root; make the root that of a new run if it has none."""
    return ensure_run(store, clock.random_bytes(8).hex(), f"{clock.unix_seconds():.0f}")
