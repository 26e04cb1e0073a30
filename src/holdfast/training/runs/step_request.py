"""The request to save one step of a run: writer lease, pins, metrics, tags and lineage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from holdfast.base.clock import utc_now_text
from holdfast.base.ports.framework import Collected, Selection
from holdfast.base.types.manifest import Manifest, Parent
from holdfast.base.types.removal import StepAndDigest
from holdfast.core.engine.background import is_done_soon, side_by_side
from holdfast.core.format.names import manifest_keys, step_of_pack
from holdfast.errors import CheckpointError, CorruptError, InvalidError, UnavailableError, first_three
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.publishing.making_room import require_not_moved
from holdfast.stored.repository.catalog import manifest_digest, read_run_id
from holdfast.stored.repository.latest import name_latest
from holdfast.stored.repository.removal import marks
from holdfast.stored.repository.timelines import run_timelines
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.runs.claim_step import KnownRun, claim_step, is_unused
from holdfast.training.runs.loaded_state import LoadedState
from holdfast.training.runs.position import Lineage
from holdfast.training.runs.removal.pins import StepPin
from holdfast.training.runs.run_parts import RunParts
from holdfast.training.runs.step_metrics import checked_metrics
from holdfast.training.runs.tags import checked_tags, tag_saved
from holdfast.training.saving.deduplication import Deduplicator
from holdfast.training.saving.target import SaveTarget

logger = logging.getLogger(__name__)


_NOT_AS_LOADED = (
    "This step was loaded, but on some rank the state is not as loaded: the state changed after the load, or only part "
    "of the step was loaded or saved."
)


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

    near_only: bool = False
    """Whether the step stays in the near tier."""

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
        self._step, self._base, self._loads = location.step, parts.base, parts.position.loads
        suspects = parts.suspect_steps.steps
        deduplicator = Deduplicator(location, self._base, parts.writer, parts.job.settings, suspects)
        self.lineage = Lineage(None, parts.position.lineage)
        """The lineage that the next save continues: this save."""
        self.target = SaveTarget(
            location,
            parts.writer,
            deduplicator,
            self,
            self.lineage.parent,
            tier=parts.tier,
            near_only=passed.near_only,
            replicates=parts.replicates,
        )
        """Where the step goes."""
        self.pin = StepPin(self._step)
        """The steps that garbage collection must not remove until this save ends."""
        self.saved: StepAndDigest | None = None
        """The step, once it is committed."""
        self._changed: list[str] = []
        """Plain values of this rank that differ from the loaded values."""
        self._metrics: dict[str, float] = {}
        self._state_bytes = 0
        """Bytes of the tensors that this rank knows of, each whole."""
        self._tags: dict[str, bool] = {}
        """Tags of the step, and for each tag whether the tag moves."""
        self._in_root: StepRequest | None = None

    def or_in_root(self, parts: RunParts) -> StepRequest:
        """Have the save go into the root if the near tier has no room; return the request for the root."""
        self._in_root = StepRequest(parts, parts.location_of(self._step), self._passed)
        self._in_root.lineage = self.lineage
        self.target = replace(self.target, in_root=self._in_root.target)
        return self._in_root

    def collect(self) -> Collected:
        """Check metrics and tags, and take the state apart. An error here on one rank refuses the save on all."""
        self._metrics = checked_metrics(self._passed.metrics)
        self._tags = checked_tags(self._passed.tags, self._passed.move_tags)
        passed = self._passed
        if self._in_root is not None:
            self._in_root._metrics, self._in_root._tags = self._metrics, self._tags
            self._in_root._passed = replace(passed, state={})
        # The handle of a save that fails in the background may be kept for long. The handle must not keep the state
        # alive.
        self._passed = replace(passed, state={})
        framework, loaded = self._parts.job.framework, self._parts.position.loaded_state
        collected = framework.collect(passed.state, passed.selection)
        if self._parts.why_no_room is not None:
            self._state_bytes = sum(each.shard.tensor.global_bytes for each in collected.shards)
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
        if parts.why_no_room is not None and (why := parts.why_no_room(self._state_bytes)):
            return self._claim_in_root(why)
        if not self._passed.is_last:
            parts.metrics.require_in(self._metrics)
        known = parts.run_facts.known(parts.writer_lease, parts.position.loads)
        context = None if known is None or known.loads != self._loads else self._claim_known(known)
        if context is None:
            context = self._claim_unknown()
        return replace(context, metrics=self._metrics, place="near" if self._passed.near_only else "")

    def _claim_in_root(self, why: str) -> SaveContext | None:
        """Claim the step in the root, since the near tier has no room.

        Raises:
            UnavailableError: The step is for the near tier alone.
        """
        if self._in_root is None:
            raise UnavailableError(
                f"step {self._step} is for the near tier alone, and {why}. Nothing was saved. Free space there, raise "
                "bytes_max or lower keep_last of the tier, or save more often in the root"
            )
        logger.warning("step %d is saved straight into the root: %s", self._step, why)
        in_root, base = self._in_root, self._in_root._base
        known = self._parts.run_facts.learnt(self._parts.writer_lease, self._parts.position.loads)
        # Without the near tier, which may be away. Nobody has looked whether the root has the base: all is written.
        known = None if known is None else replace(known, base=None if base is None else base.identity)
        context = None if known is None else in_root._claim_known(known)
        context = in_root._claim_unknown() if context is None else context
        return replace(context, base=None, metrics=self._metrics, place="root")

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
            run=parts.run_store,
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
        loaded, store = self._parts.position.loaded_state, self._parts.run_store
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
        parts = self._parts
        self.saved = context.loaded or (self._step, manifest_digest)
        if context.loaded is not None:
            if parts.on_commit is not None:
                parts.on_commit(*context.loaded, not self._passed.near_only)
            return self._tag_held(*context.loaded)
        self.lineage.commit(Parent(context.run_id, self._step, manifest_digest))
        # A load meanwhile has moved this process to another step: training no longer continues from this save.
        is_current = self._loads == parts.position.loads
        base = self.target.deduplicator.committed(manifest_digest)
        if is_current:
            parts.note_base(base)
        if parts.on_commit is not None:
            parts.on_commit(self._step, manifest_digest, not self._passed.near_only)
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
        untagged += tag_saved(self._parts.run_store, self._parts.job.clock, self._step, manifest_digest, self._tags)

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
