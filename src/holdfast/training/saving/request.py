"""The request of a save: the state, the location, and the calls back to the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from holdfast.base.clock import utc_now_text
from holdfast.base.ports.framework import Collected, Selection
from holdfast.base.types.manifest import Manifest, Parent
from holdfast.core.engine.background import DAEMON_POOL, wait_in_slices
from holdfast.core.engine.writing.write import PackWriter
from holdfast.errors import UnavailableError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.training.coordination.job import VERDICT_GRACE_SECONDS, Job
from holdfast.training.coordination.save_context import SaveContext
from holdfast.training.saving.deduplication import Deduplicator
from holdfast.training.saving.overwrite import Overwriting

T = TypeVar("T")


class SaveRequest(Protocol):
    """One save as its caller sees it. The save calls the methods in the order below."""

    @property
    def location(self) -> CheckpointLocation:
        """Where the checkpoint goes."""
        ...

    @property
    def writer(self) -> PackWriter:
        """Writes packs at the location."""
        ...

    @property
    def deduplicator(self) -> Deduplicator:
        """Leaves out pieces that an earlier step of the run holds."""
        ...

    @property
    def overwrites(self) -> bool:
        """Whether the save may replace a checkpoint that is there; the same on every rank."""
        ...

    @property
    def on_end(self) -> Callable[[], None] | None:
        """Called on every rank once the save has ended there, however it ended; it keeps neither state nor job."""
        ...

    def collect(self) -> Collected:
        """Take the state apart. On every rank, in the call that saves.

        Raises:
            InvalidError: The state or the call is wrong on this rank; every rank then refuses the save.
        """
        ...

    def claim(self) -> SaveContext:
        """Check the location before any rank writes, and return the context for every rank. On rank 0 only.

        Raises:
            ConflictError: A checkpoint is there, or another job writes to the root.
        """
        ...

    @property
    def is_loaded(self) -> bool:
        """Whether this rank holds the step that is saved, as it loaded it. Known once the state is collected."""
        ...

    def confirm(self) -> SaveContext | None:
        """Return the context of a save that writes nothing: every rank holds the step. On rank 0 only.

        None if the step is not there any more: then it is saved.
        """
        ...

    def confirmed(self, context: SaveContext) -> tuple[str, ...]:
        """Take note that the step is saved already. On every rank, on the commit thread, before the handle reports.

        Returns:
            As `committed`.
        """
        ...

    def parent(self) -> Parent | None:
        """Return the checkpoint that this one continues. On the committing rank, once every rank has written."""
        ...

    def judge_again(self, manifest: Manifest) -> None:
        """Look again at what the claim has looked at. On the committing rank, just before it publishes.

        Raises:
            CheckpointError: It must not be published.
        """
        ...

    def committed(self, context: SaveContext, manifest_digest: str) -> tuple[str, ...]:
        """Take note of the commit. On every rank, on the commit thread, before the handle reports it.

        Returns:
            Why the step did not get some of its tags, a text for each.
        """
        ...


class NeverLoaded:
    """What a request lacks that saves outside the loop of a run: no load filled the state, and it refers to no step."""

    is_loaded = False

    def judge_again(self, manifest: Manifest) -> None:
        """Do nothing: the put decides whether the path or step is free, and nothing is referred to."""

    def confirm(self) -> SaveContext | None:
        """Never called."""
        raise AssertionError("no rank states that it holds the step")

    def confirmed(self, context: SaveContext) -> tuple[str, ...]:
        """Never called."""
        raise AssertionError("no rank states that it holds the step")


class PathRequest(NeverLoaded):
    """A save of one checkpoint by path, outside any run."""

    def __init__(
        self,
        job: Job,
        location: CheckpointLocation,
        state: Mapping[str, object],
        selection: Selection,
        *,
        overwrite: bool = False,
    ) -> None:
        """Do nothing yet.

        Args:
            job: The ranks that save.
            location: Where this one checkpoint goes.
            state, selection: The state, and the names of it that are saved.
            overwrite: Whether a checkpoint that is there is replaced.
        """
        self._job, self._selection = job, selection
        self._state: Mapping[str, object] = state
        self.location = location
        self.overwrites = overwrite
        self._overwriting = Overwriting(location, job) if overwrite and job.comm.rank == 0 else None
        self.on_end = None if self._overwriting is None else self._overwriting.end
        self.writer = PackWriter(location.store, job.settings, job.codecs)
        self.deduplicator = Deduplicator(self.location, None, self.writer, job.settings)

    def collect(self) -> Collected:
        """Take the state apart."""
        # The handle of a save that fails in the background may be kept for long: it must not keep the state alive.
        state, self._state = self._state, {}
        return self._job.framework.collect(state, self._selection)

    def claim(self) -> SaveContext:
        """Refuse a path that holds a checkpoint, unless it is to be overwritten."""
        if self._overwriting is not None:
            return self._overwriting.claim()
        return claim_path(self.location, self._job, "Save elsewhere, or replace it with overwrite=True")

    def parent(self) -> Parent | None:
        """Return None: a checkpoint saved by path continues no other."""
        return None

    def committed(self, context: SaveContext, manifest_digest: str) -> tuple[str, ...]:
        """Note on rank 0 what was replaced; no later save refers to a checkpoint saved by path."""
        if self._overwriting is not None and self._job.comm.world_size > 1:
            self._overwriting.note_replaced()
        return ()


def claim_path(location: CheckpointLocation, job: Job, way_out: str | None = None) -> SaveContext:
    """Return the context of a checkpoint saved by path.

    Args:
        location: The path.
        job: The ranks that save.
        way_out: What the caller can do about a checkpoint that is there.
    Raises:
        ConflictError: A checkpoint is there.
    """
    location.require_empty(way_out)
    return SaveContext(run_id=job.clock.random_bytes(8).hex(), created=utc_now_text(job.clock))


def claim_in_time(job: Job, claim: Callable[[], T], name: str, deadline: float, url: str) -> T:
    """Claim the location, on rank 0; on another thread, so that the other ranks are told if storage hangs.

    Args:
        job: The ranks.
        claim: Claims or confirms, as a `SaveRequest` does.
        name: Name of the save, for messages.
        deadline: When the agreement must end, on the monotonic clock.
        url: The location, for messages.
    Raises:
        UnavailableError: Storage gave no answer in time.
        CheckpointError: The location cannot be claimed.
    """

    def claim_noted() -> T:
        # A claim that hangs is reported by the saves after it, as a write that hangs.
        with job.progress.asking(name, job.stall_seconds):
            return claim()

    if job.comm.world_size == 1:
        seconds = job.seconds_left(job.agreement_deadline())
    else:
        # Before the other ranks give up. If the last rank came late, the claim has the time that they wait for a
        # verdict after the deadline.
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
