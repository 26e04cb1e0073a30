"""The request to save one step of a run: writer lease, pins, metrics, tags and lineage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from holdfast.base.clock import utc_now_text
from holdfast.base.ports.framework import Collected, Selection
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest, Parent
from holdfast.core.engine.background import is_done_soon, side_by_side
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.format.names import manifest_keys, step_of_pack
from holdfast.errors import CheckpointError, CorruptError, InvalidError, first_three
from holdfast.policies import KeepPolicy
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.leases.writer import WriterLease
from holdfast.stored.repository.catalog import manifest_digest, read_run_id
from holdfast.stored.repository.latest import name_latest
from holdfast.stored.repository.removal import marks
from holdfast.stored.repository.timeline_records import record_keys
from holdfast.stored.repository.timelines import run_timelines
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.runs.claim_step import KnownRun, RunFacts, claim_step, is_unused, require_not_moved
from holdfast.training.runs.loaded_state import LoadedState
from holdfast.training.runs.position import Lineage, RunPosition
from holdfast.training.runs.removal.background_collection import Background
from holdfast.training.runs.removal.chosen_steps import NOTHING_CHOSEN, ChosenNames
from holdfast.training.runs.removal.garbage_collection import CheckpointGC
from holdfast.training.runs.removal.pins import Pins, StepPin
from holdfast.training.runs.step_metrics import WantedMetrics, checked_metrics
from holdfast.training.runs.suspect_steps import SuspectSteps
from holdfast.training.runs.tags import checked_tags, tag_saved
from holdfast.training.saving.deduplication import Deduplicator
from holdfast.training.saving.target import SaveTarget

logger = logging.getLogger(__name__)


class RunParts:
    """Resources that all saves of a run share, on one rank."""

    def __init__(self, job: Job, home: CheckpointLocation, keep: KeepPolicy | None) -> None:
        """Start before the first step.

        Args:
            job: The ranks.
            home: The root of the run.
            keep: The retention policy; None to collect only what a load discarded, and segments of the redo log.
        """
        store, settings = home.store, job.settings
        self.job = job
        self.store = store
        """The root of the run."""
        self.writer = PackWriter(store, settings, job.codecs)
        """Writes packs below the root."""
        self.writer_lease = WriterLease(store, job.clock, settings.lease_seconds)
        """The right to write to the root."""
        self.run_facts = RunFacts()
        """Facts of the run that the next save need not read again."""
        self.pins = Pins()
        """Steps that garbage collection must leave alone."""
        self.position = RunPosition(job, home, self.pins)
        """The base step and the lineage of the next save."""
        self.metrics = WantedMetrics(store, keep)
        """Metrics that the retention policy ranks by."""
        self.suspect_steps = SuspectSteps(store)
        """Steps whose packs may be damaged."""
        self.collecting: Background | None = None
        """Garbage collection on rank 0; None on other ranks."""
        if job.comm.rank == 0:
            # Without a policy, only steps that a load discarded are removed.
            choice = NOTHING_CHOSEN if keep is not None else ChosenNames(is_all=True)
            collector = CheckpointGC(store, job.clock, keep, self.writer_lease, self.pins, choice)
            may_collect = _always if keep is not None else partial(_has_unneeded, store, self.run_facts, self.pins)
            self.collecting = Background(collector, settings.collect_grace_seconds, job.clock, may_collect)

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


_NOT_AS_LOADED = (
    "This step was loaded, but on some rank the state is not as loaded: the state changed after the load, or only part "
    "of the step was loaded or saved."
)


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

    move_tags: Iterable[str] | str = ()
    """Tags that move to the step, as passed, not checked yet."""

    misuse: InvalidError | None = None
    """The error in the arguments on this rank; the other fields are then empty."""

    is_last: bool = False
    """Whether the job ends after this save. Then metrics that the policy ranks by may be missing."""


class StepRequest:
    """The save of one step of a run: target, state, and the hooks of the save."""

    def __init__(self, parts: RunParts, location: CheckpointLocation, passed: StepState) -> None:
        """Do nothing yet.

        Args:
            parts: Resources of the run.
            location: Where the step goes.
            passed: Arguments of the training loop.
        """
        assert location.step is not None, "a run saves steps"
        self._parts, self._passed = parts, passed
        self._step, self._base, self._loads = location.step, parts.position.base, parts.position.loads
        suspects = parts.suspect_steps.steps
        deduplicator = Deduplicator(location, self._base, parts.writer, parts.job.settings, suspects)
        self.lineage = Lineage(None, parts.position.lineage)
        """The lineage that the next save continues: this save."""
        self.target = SaveTarget(location, parts.writer, deduplicator, self, self.lineage.parent)
        """Where the step goes."""
        self.pin = StepPin(self._step)
        """The steps that garbage collection must not remove until this save ends."""
        self._changed: list[str] = []
        """Plain values of this rank that differ from the loaded values."""
        self._metrics: dict[str, float] = {}
        self._tags: dict[str, bool] = {}
        """Tags of the step, and for each tag whether the tag moves."""

    def collect(self) -> Collected:
        """Check metrics and tags, and take the state apart. An error here on one rank refuses the save on all."""
        self._metrics = checked_metrics(self._passed.metrics)
        self._tags = checked_tags(self._passed.tags, self._passed.move_tags)
        passed = self._passed
        # The handle of a save that fails in the background may be kept for long. The handle must not keep the state
        # alive.
        self._passed = replace(passed, state={})
        framework, loaded = self._parts.job.framework, self._parts.position.loaded_state
        collected = framework.collect(passed.state, passed.selection)
        # Only now: after an evaluation FSDP2 shows whole parameters; the collection makes FSDP2 show shards again.
        is_still = loaded is not None and loaded.is_still(framework, self._step, passed.state, passed.selection)
        as_loaded = loaded is not None and is_still and self._equals(loaded, collected, passed.state)
        return replace(collected, as_loaded=True) if as_loaded else collected

    def _equals(self, loaded: LoadedState, collected: Collected, state: Mapping[str, object]) -> bool:
        try:
            is_alone = self._parts.job.comm.world_size == 1
            self._changed = sorted(loaded.changed_values(collected, state, is_alone=is_alone))
            if self._changed:
                return False
            with self._parts.writer.lent() as buffer:
                return loaded.equals(collected, buffer)
        except Exception as error:  # noqa: BLE001 - the save goes on, and finds the step or the fault
            logger.warning("step %d: whether it is as it was loaded is unknown: %s", self._step, error)
            return False

    def claim(self, is_held: bool) -> SaveContext | None:
        """Take the writer lease, free the step, and pin the step and its base against garbage collection."""
        parts = self._parts
        if is_held:
            return self._held()
        if not self._passed.is_last:
            parts.metrics.require_in(self._metrics)
        known = parts.run_facts.known(parts.writer_lease, parts.position.loads)
        context = None if known is None or known.loads != self._loads else self._claim_known(known)
        if context is None:
            context = self._claim_unknown()
        return replace(context, metrics=self._metrics)

    def _claim_known(self, known: KnownRun) -> SaveContext | None:
        """Return the context of a step in a known run, after one look at storage; None if one look is not enough."""
        parts, base = self._parts, self._base
        if base is not None and not base.is_own and base.identity != known.base:
            return None
        has_base = parts.pins.pin(self.pin, None if base is None else base.identity[0])
        suspect_steps: frozenset[int] | None = None
        is_free = False

        def look_at_step() -> None:
            nonlocal is_free
            is_free = is_unused(self.target.location)

        def look_at_suspects() -> None:
            nonlocal suspect_steps
            suspect_steps = frozenset(parts.suspect_steps.steps())

        def look_at_packs() -> None:
            # After a failure here, the comparison looks at the packs again; if that fails too, it refers to no pack.
            with suppress(CheckpointError):
                self.target.deduplicator.look_at(older)

        older = self.target.deduplicator.older_packs if has_base else []
        # A save that is likely to refer to these packs again needs the suspect steps now. Any other save reads the
        # suspect steps only before it refers to a pack.
        looks = (look_at_suspects, look_at_packs) if older else ()
        side_by_side(*looks, look_at_step)
        if not is_free:
            return None
        return SaveContext(
            known.run_id,
            utc_now_text(parts.job.clock),
            known.epoch,
            known.timeline,
            base=base.identity if has_base and base is not None else None,
            suspect_steps=suspect_steps,
        )

    def _claim_unknown(self) -> SaveContext:
        """Return the context of a step after a look at the whole run, and remember the facts that stay true."""
        parts = self._parts
        base = self._base.identity if self._pin() and self._base is not None else None
        timeline = partial(parts.position.timeline_for, self._step)
        suspects_in = parts.suspect_steps.named_by if base is not None else None
        why = _NOT_AS_LOADED if parts.position.origin_step == self._step else ""
        if why and self._changed:
            why += f" Here these values have changed: {first_three(self._changed)}."
        context = claim_step(
            self.target.location,
            parts.writer_lease,
            parts.job.clock,
            timeline,
            suspects_in,
            why=why,
            # Steps without a run are those of an unfinished copy. A new root costs no request for that.
            may_be_copy=parts.position.origin_step is not None or parts.position.starts_over,
        )
        parts.run_facts.learn(KnownRun(context.run_id, context.epoch, context.timeline, self._loads, base))
        return replace(context, base=base)

    def check_again(self, manifest: Manifest) -> None:
        """Refuse to publish a second manifest of the step on its timeline, or references to steps suspect by now.

        Raises:
            ConflictError: The timeline has a manifest of the step by now.
            CorruptError: The manifest refers to packs that are suspect since the save began.
        """
        referred = {step for pack in manifest.packs if (step := step_of_pack(pack.name)) is not None}
        suspects: list[int] = []

        def look_at_suspects() -> None:
            suspects.extend(self._parts.suspect_steps.steps())

        looks = (look_at_suspects,) if referred else ()
        side_by_side(*looks, partial(require_not_moved, self.target.location, manifest.timeline))
        found = sorted(referred & set(suspects))
        if found:
            raise CorruptError(
                f"step {self._step} refers to packs of steps [{first_three(found)}], which are suspect since the save "
                "began: a load found damage. Expected packs without known damage. Nothing was published. Save again: "
                "the next save writes these tensors in full"
            )

    def _held(self) -> SaveContext | None:
        """Return the context of a save that writes nothing; None if the step is gone since the load."""
        loaded, store = self._parts.position.loaded_state, self._parts.store
        assert loaded is not None, "every rank states that it holds the step"
        manifest, run_id = run_timelines(store).at(self._step), read_run_id(store)
        if run_id is None or manifest is None or manifest.digest != loaded.manifest.digest:
            return None
        return SaveContext(run_id, utc_now_text(self._parts.job.clock), loaded=(self._step, loaded.manifest.digest))

    def _tag_held(self, step: int, digest: str) -> tuple[str, ...]:
        """Tag a step that was saved already. Metrics cannot be added: the manifest of the step holds the metrics."""
        if self._parts.job.comm.rank != 0:
            return ()
        if self._metrics:
            logger.warning(
                "step %d is saved already, so its metrics stay as they are; not added: %s. Save metrics with the next "
                "step",
                step,
                first_three(sorted(self._metrics)),
            )
        return self._named_in_time(partial(self._tag, digest)) if self._tags else ()

    def committed(self, context: SaveContext, manifest_digest: str) -> tuple[str, ...]:
        """Record this step as parent and base of later saves; on rank 0, name the step and request garbage collection.

        Returns:
            Why the step did not get some tags, a text for each tag.
        """
        if context.loaded is not None:
            return self._tag_held(*context.loaded)
        parts = self._parts
        self.lineage.commit(Parent(context.run_id, self._step, manifest_digest))
        # A load meanwhile has moved this process to another step: training no longer continues from this save.
        is_current = self._loads == parts.position.loads
        base = self.target.deduplicator.committed(manifest_digest)
        if is_current:
            parts.position.base = base
        if parts.job.comm.rank != 0:
            return ()
        if is_current:
            parts.pins.current = (self._step, manifest_digest)
        return self._named_in_time(partial(self._release, manifest_digest))

    def _release(self, manifest_digest: str, untagged: list[str]) -> None:
        """Name the step, and unpin the step for garbage collection.

        Args:
            manifest_digest: Digest of the manifest.
            untagged: Receives the reason for each tag that the step did not get.
        """
        parts = self._parts
        self._tag(manifest_digest, untagged)
        parts.pins.unpin(self.pin, is_committed=True)
        parts.collect_soon()
        name_latest(parts.store, self._step, parts.job.is_first_occurrence)

    def _tag(self, manifest_digest: str, untagged: list[str]) -> None:
        untagged += tag_saved(self._parts.store, self._parts.job.clock, self._step, manifest_digest, self._tags)

    def _named_in_time(self, name: Callable[[list[str]], None]) -> tuple[str, ...]:
        """Give the step its names, unless storage hangs; return why the step did not get some tags.

        The handle reports a step with its names. But a committed save counts although storage hangs.

        Args:
            name: Names the step; takes a list for the reasons of missing tags.
        """
        untagged: list[str] = []
        if not is_done_soon(partial(name, untagged), self._parts.job.clock):
            logger.warning("step %d is saved, but storage does not answer: it gets its names later", self._step)
            return tuple(f"{tag}: storage does not answer; the step gets it later" for tag in self._tags)
        return tuple(untagged)

    def _pin(self) -> bool:
        """Pin the step and its base; return whether the base still exists."""
        store, base = self._parts.store, None if self._base is None else self._base.identity
        if not self._parts.pins.pin(self.pin, None if base is None else base[0]) or base is None:
            return False
        # Check after the pin: another process may have removed the base before this process took the writer lease.
        step, digest = base
        if all(manifest_digest(store, step, key) != digest for key in manifest_keys(step, digest)):
            return False
        return not any(base in mark.steps for mark in marks(store) if mark.is_carried_out)
