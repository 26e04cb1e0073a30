"""What the saves of a run share, on one rank: the state of the run, and the resources of each place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from holdfast.base.ports.store import Store
from holdfast.base.types.reports import Tier
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.names import step_folder
from holdfast.errors import CheckpointError
from holdfast.policies import KeepPolicy
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.catalog import read_run_id
from holdfast.stored.repository.timeline_records import record_keys
from holdfast.training.coordination.job import Job
from holdfast.training.runs.claim_step import RunFacts
from holdfast.training.runs.position import RunPosition
from holdfast.training.runs.removal.background_collection import Background
from holdfast.training.runs.removal.chosen_steps import NOTHING_CHOSEN, ChosenNames
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from holdfast.training.runs.removal.pins import Pins
from holdfast.training.runs.step_metrics import WantedMetrics
from holdfast.training.runs.suspect_steps import SuspectSteps
from holdfast.training.saving.deduplication import BaseStep

logger = logging.getLogger(__name__)


class RunState:
    """The state of a run that its places share, on one rank."""

    def __init__(self, job: Job, home: CheckpointLocation, keep: KeepPolicy | None) -> None:
        """Start before the first step.

        Args:
            job: The ranks.
            home: The run: the root, or the near tier and the root as one.
            keep: The retention policy of the root.
        """
        self.home = home
        """The run."""
        self.writer_lease = WriterLease(home.store, job.clock, job.settings.lease_seconds)
        """The right to write to the run."""
        self.position = RunPosition(job, home)
        """The lineage and the timeline of the next save."""
        self.metrics = WantedMetrics(home.store, keep)
        """Metrics that the retention policy ranks by."""


class RunParts:
    """Resources that all saves into one place of a run share, on one rank: into the root, or into the near tier."""

    def __init__(
        self, job: Job, store: Store, keep: KeepPolicy | None, state: RunState, *, tier: Tier = "root"
    ) -> None:
        """Start before the first step.

        Args:
            job: The ranks.
            store: The place.
            keep: The retention policy of the place; None to collect only what a load discarded, and segments of the
                redo log.
            state: The state of the run.
            tier: Which place.
        """
        settings = job.settings
        self.job = job
        self.store = store
        """The place."""
        self.run_store = state.home.store
        """The run: the root, or the near tier and the root as one."""
        self.tier = tier
        """Which place."""
        self.writer = PackWriter(store, settings, job.codecs)
        """Writes packs below the place."""
        self.run_facts = RunFacts()
        """Facts of the run that the next save need not read again."""
        self.pins = Pins()
        """Steps that garbage collection must leave alone."""
        self.writer_lease, self.position, self.metrics = state.writer_lease, state.position, state.metrics
        self.position.pins.append(self.pins)
        self.on_commit: Callable[[int, str, bool], None] | None = None
        """Called on each rank after a commit into the place, with step, digest, and whether the step is due at the
        root. Set for a near tier."""
        self.why_no_room: Callable[[int], str] | None = None
        """Takes the bytes of the state; returns why the place has no room for the next step, empty if there is room.
        Set for a near tier."""
        self.replicates = False
        """Whether the nodes of the place protect each other. Set for a near tier of peers."""
        self._home = CheckpointLocation(store, "", None, references=state.home.references, root=store)
        self._committed: tuple[int, BaseStep | None] = -1, None
        """The step that this rank committed last into the place, and how many loads had begun then."""
        self.suspect_steps = SuspectSteps(store)
        """Steps whose packs may be damaged."""
        self.collecting: Background | None = None
        """Garbage collection on rank 0; None on other ranks."""
        if job.comm.rank == 0:
            # Without a policy, only steps that a load discarded are removed.
            choice = NOTHING_CHOSEN if keep is not None else ChosenNames(is_all=True)
            collector = CheckpointGC(store, job.clock, keep, self.writer_lease, self.pins, choice)
            self.may_collect = _always if keep is not None else partial(_has_unneeded, store, self.run_facts, self.pins)
            """Whether anything may go. Of a near tier not before the due steps of earlier jobs are pinned."""
            clock, grace = job.clock, settings.collect_grace_seconds
            self.collecting = Background(collector, grace, clock, lambda: self.may_collect())

    def location_of(self, step: int) -> CheckpointLocation:
        """Return the location of a step in the place."""
        return replace(self._home, folder=step_folder(step), step=step)

    @property
    def base(self) -> BaseStep | None:
        """The last step that this rank saved into the place, or loaded. Whether the place has it, the claim looks."""
        begun_loads, committed = self._committed
        # The packs of a loaded step may lie on nodes that are lost: the first step of peers in a job stands alone.
        loaded = None if self.replicates else self.position.base
        return committed if begun_loads == self.position.begun_loads else loaded

    def note_base(self, base: BaseStep) -> None:
        """Record the step that this rank committed last into the place."""
        self._committed = self.position.begun_loads, base

    def collect_soon(self) -> None:
        """Request a collection on rank 0, if there is a policy, or if a load of this run has discarded steps."""
        if self.collecting is not None:
            self.collecting.want()

    def kept(self, keep: KeepPolicy | None) -> dict[int, tuple[str, ...]]:
        """Return the steps that stay under a policy, with the reasons. Errors as `CheckpointGC.survey`."""
        if read_run_id(self.store) is None:
            return {}
        inventory = CheckpointGC(self.store, self.job.clock, keep, None, self.pins).survey()
        return dict(sorted(inventory.reasons.items()))

    def close(self, may_wait: Callable[[], bool]) -> None:
        """End garbage collection, then release the writer lease.

        Args:
            may_wait: Whether to wait until the steps are removed that no policy keeps, or that a load discarded; called
                repeatedly.
        """
        if self.collecting is None:
            self.writer_lease.release()
        else:
            self.collecting.close(self.writer_lease.release, may_wait)


def _always() -> bool:
    return True


def _has_unneeded(store: Store, facts: RunFacts, pins: Pins) -> bool:
    """Return whether a collection has to remove steps that loads have discarded, or segments of the redo log."""
    if pins.log:
        return True
    if facts.has_one_timeline:
        return False
    with suppress(CheckpointError):  # The next commit looks again.
        return bool(record_keys(store))
    return False
