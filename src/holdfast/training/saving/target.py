"""The target of a save: location, writer, base step, and the three hooks that call the owner of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from holdfast.base.clock import utc_now_text
from holdfast.base.ports.framework import Collected, Selection
from holdfast.base.types.manifest import Manifest, Parent
from holdfast.base.types.reports import Tier
from holdfast.core.engine.background import DAEMON_POOL, wait_in_slices
from holdfast.core.engine.writing.write import PackWriter
from holdfast.core.plan.plan_cache import SavePlan
from holdfast.errors import UnavailableError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import VERDICT_GRACE_SECONDS, Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.saving.deduplication import Deduplicator
from holdfast.training.saving.overwrite import Overwriting

T = TypeVar("T")

Collect = Callable[[], Collected]
"""Takes the state apart, on every rank, in the call that saves. An `InvalidError` refuses the save on every rank."""


class SaveHooks(Protocol):
    """The calls of a save to the owner of its target, in this order."""

    def claim(self, is_held: bool) -> SaveContext | None:
        """Check the location before any rank writes, and return the context for every rank. On rank 0 only.

        Args:
            is_held: Whether every rank holds the step as loaded: then the context is of a save that writes nothing. A
                result of None means that the step is gone: the save calls again with False.
        Raises:
            ConflictError: The location holds a checkpoint, or another job writes to the root.
        """
        ...

    def check_again(self, manifest: Manifest) -> None:
        """Check once more the facts on which the claim relied. On the committing rank, just before the publish.

        Raises:
            CheckpointError: The manifest must not be published.
        """
        ...

    def committed(self, context: SaveContext, manifest_digest: str) -> tuple[str, ...]:
        """Record the commit. On every rank, on the commit thread, before the handle reports the commit.

        Returns:
            Why the step did not get some of its tags, a text for each.
        """
        ...


def _no_parent() -> None:
    return None


def _note_no_plan(attempt: str, plan: SavePlan) -> None:
    """Take note of no plan."""


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where one save goes."""

    location: CheckpointLocation
    """Where the checkpoint goes."""

    writer: PackWriter
    """Writes packs at the location."""

    deduplicator: Deduplicator
    """Leaves out pieces that an earlier step of the run holds. Belongs to this save alone."""

    hooks: SaveHooks
    """The owner of the target. Must not keep the state: the handle of a failed save may be kept for long."""

    parent: Callable[[], Parent | None] = _no_parent
    """Returns the parent of the checkpoint. Called on the committing rank, once every rank has written."""

    overwrites: bool = False
    """Whether the save may replace a checkpoint at the location; the same on every rank."""

    planned: Callable[[str, SavePlan], None] = _note_no_plan
    """Called on every rank, in the call that saves, with the id of the attempt and the plan of all pieces of this rank.
    """

    log: str | None = None
    """Id of the redo log of which the checkpoint is a base; empty: the log begins here, and has the id of the attempt.
    None: there is no log. The same on every rank."""

    tier: Tier = "root"
    """The place of the location."""

    near_only: bool = False
    """Whether the step stays in the near tier, so that the root never has it by itself."""

    replicates: bool = False
    """Whether the nodes of the place protect each other."""

    in_root: SaveTarget | None = None
    """Of a target in the near tier: where the save goes if the near tier has no room."""

    on_end: Callable[[], None] | None = None
    """Called on every rank once the save has ended there, in success or failure. Keeps neither state nor job."""


class PathHooks:
    """A save of one checkpoint by path, outside any run."""

    def __init__(self, job: Job, location: CheckpointLocation, overwriting: Overwriting | None) -> None:
        """Claim nothing yet.

        Args:
            job: The ranks that save.
            location: Where this one checkpoint goes.
            overwriting: On rank 0 of a save that may overwrite.
        """
        self._job, self._location, self._overwriting = job, location, overwriting

    def claim(self, is_held: bool) -> SaveContext:
        """Refuse a path that holds a checkpoint, unless the checkpoint is to be overwritten."""
        assert not is_held, "no load of a run fills the state of a path"
        if self._overwriting is not None:
            return self._overwriting.claim()
        return claim_path(self._location, self._job, "Save elsewhere, or replace it with overwrite=True")

    def check_again(self, manifest: Manifest) -> None:
        """Do nothing: the put decides whether the path is free, and the manifest refers to no step."""

    def committed(self, context: SaveContext, manifest_digest: str) -> tuple[str, ...]:
        """Record on rank 0 the attempt that was replaced; no later save refers to a checkpoint saved by path."""
        if self._overwriting is not None and self._job.comm.world_size > 1:
            self._overwriting.note_replaced()
        return ()


def path_target(job: Job, location: CheckpointLocation, *, overwrite: bool = False) -> SaveTarget:
    """Return the target of one checkpoint saved by path.

    Args:
        job: The ranks that save.
        location: Where this one checkpoint goes.
        overwrite: Whether a checkpoint at the location is replaced.
    """
    overwriting = Overwriting(location, job) if overwrite and job.comm.rank == 0 else None
    writer = PackWriter(location.store, job.settings, job.codecs)
    return SaveTarget(
        location,
        writer,
        Deduplicator(location, None, writer, job.settings),
        PathHooks(job, location, overwriting),
        overwrites=overwrite,
        on_end=None if overwriting is None else overwriting.end,
    )


def path_save(
    job: Job,
    location: CheckpointLocation,
    state: Mapping[str, object],
    selection: Selection,
    *,
    overwrite: bool = False,
) -> tuple[SaveTarget, Collect]:
    """Return the target of a state saved by path, and the function that takes the state apart.

    Args:
        job, location, overwrite: As in `path_target`.
        state, selection: The state, and the names of the state that are saved.
    """
    return path_target(job, location, overwrite=overwrite), partial(job.framework.collect, state, selection)


def claim_path(location: CheckpointLocation, job: Job, way_out: str | None = None) -> SaveContext:
    """Return the context of a checkpoint saved by path.

    Args:
        location: The path.
        job: The ranks that save.
        way_out: Advice to the caller if the path holds a checkpoint.
    Raises:
        ConflictError: The path holds a checkpoint.
    """
    location.require_empty(way_out)
    return SaveContext(run_id=job.clock.random_bytes(8).hex(), created=utc_now_text(job.clock))


def claim_in_time(job: Job, claim: Callable[[], T], name: str, deadline: float, url: str) -> T:
    """Claim the location, on rank 0; on another thread, so that the other ranks learn of storage that hangs.

    Args:
        job: The ranks.
        claim: Claims the location.
        name: Name of the save, for messages.
        deadline: When the agreement must end, on the monotonic clock.
        url: The location, for messages.
    Raises:
        UnavailableError: Storage gave no answer in time.
        CheckpointError: The location cannot be claimed.
    """

    def claim_noted() -> T:
        # Later saves report a claim that hangs, as a write that hangs.
        with job.progress.asking(name, job.stall_seconds):
            return claim()

    if job.comm.world_size == 1:
        seconds = job.seconds_left(job.agreement_deadline())
    else:
        # Before the other ranks give up. If the last rank was late, the claim may take the time that other ranks wait
        # for a verdict after the deadline.
        reserve = min(job.agreement_seconds / 10, VERDICT_GRACE_SECONDS)
        seconds = max(job.seconds_left(deadline - reserve), reserve)
    future = DAEMON_POOL.submit(claim_noted)
    try:
        return wait_in_slices(future, seconds, job.clock, lambda: None)
    except TimeoutError:
        if future.done():
            raise
    job.progress.give_up(name)
    raise UnavailableError(
        f"{name}: the look at {url} did not end within {seconds:,.1f} s; expected an answer of the "
        "storage. Nothing was saved; look at the storage"
    )
