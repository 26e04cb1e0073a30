"""The position of a process in a run: the step it loaded, the newer steps, and what the next save continues.

A process is on no timeline until its first save after its start or after a load. Rank 0 then decides, once it holds the
writer lease:

    nothing loaded, no step stored       the first timeline, or a new one without ancestors if a newer one had steps
    nothing loaded, steps stored         refused, unless the manager starts over
    loaded the end of the chain          the newest timeline
    loaded an older or superseded step   a new timeline, which leaves the timeline of that step there
    made to start over                   a new timeline without ancestors

The decision holds until the next load, also if the save fails: a step of the new timeline may be in flight.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace

from holdfast.base.interrupts import GUARD
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Parent
from holdfast.base.types.timeline import FIRST_TIMELINE, Fork, Timeline
from holdfast.errors import CheckpointError, InvalidError, first_three
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.quarantine import is_skipped, list_records, supersede
from holdfast.stored.repository.timeline_records import take_back
from holdfast.stored.repository.timelines import RunTimelines, StoredManifest, run_timelines, timelines_from
from holdfast.training.coordination.job import Job
from holdfast.training.loading.load import Loaded
from holdfast.training.loading.load_request import LoadRequest
from holdfast.training.loading.named_step import StepQuery
from holdfast.training.loading.step_choice import StepChoice
from holdfast.training.runs.loaded_state import LoadedState, loaded_state
from holdfast.training.runs.removal.pins import Pins, StepPin
from holdfast.training.saving.deduplication import BaseStep, base_from_loaded

logger = logging.getLogger(__name__)

_ID_BYTES = 8


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


@dataclass(frozen=True, slots=True)
class _LoadedStep:
    """The step that training continues from."""

    step: int
    digest: str
    timeline: Timeline
    in_flight: frozenset[StepPin]
    """Saves of this process that had not ended when it loaded. They belong to the timeline of before."""
    redone: int | None = None
    """The step to which records of the redo log were redone; None if there were none."""
    leaves_records: bool = False
    """Whether the log reaches further than that step."""

    @property
    def at(self) -> int:
        """The step of the state: the loaded one, or the last redone one."""
        return self.step if self.redone is None else self.redone


class RunPosition:
    """The position of this process in a run, on one rank."""

    def __init__(self, job: Job, home: CheckpointLocation) -> None:
        """Start before the first step.

        Args:
            job: The ranks.
            home: The root of the run; with a near tier, both places as one.
        """
        self._job, self.home, self._store = job, home, home.store
        self.pins: list[Pins] = []
        """Steps that the collection of each place must leave alone."""
        self.starts_over = False
        """Whether the first save begins a timeline without ancestors, whatever the root holds. A load ends this."""
        self.base: BaseStep | None = None
        """The step that this rank loaded last, unless a load failed since."""
        self.lineage = Lineage(None, None)
        """The checkpoint, or the save in flight, that the next save continues."""
        self.loaded: int | None = None
        """The step that was loaded last; None once the state may have changed since."""
        self.loaded_state: LoadedState | None = None
        """The state as the last load left it, if that was a whole one; None once another step is saved."""
        self.begun_loads = 0
        """Number of loads that have begun, also of those that failed."""
        self.loads = 0
        """Number of loads: a save that began before the last one must not move the position."""
        self._newer: tuple[int, ...] = ()
        self._origin: _LoadedStep | None = None
        self._timeline: Timeline | None = None
        self._last_number = 0
        self._deciding = threading.Lock()  # Taken on threads of DAEMON_POOL alone: no handler meets it.
        """Held while a save decides on the timeline."""

    def choice(self, find: StepQuery | None, *, discards: bool) -> StepChoice:
        """Return the choice of the step of a load.

        Args:
            find: Finds the step; None for the newest valid one.
            discards: Whether the load discards the newer steps.
        """
        # The load may fail because the base step is damaged: then the next save must not refer to it.
        self.base = None
        self.begun_loads += 1
        return StepChoice(self.home, find, newer=self._newer_than, discards=discards, may_be_empty=True)

    def leave(self, step: int) -> None:
        """Take note that a step is saved: the state may differ from the loaded one from now on."""
        self.loaded = None
        if self.loaded_state is not None and step != self.loaded_state.step:
            self.loaded_state = None

    def move_to(self, loaded: Loaded, request: LoadRequest) -> None:
        """Take a loaded step as the position."""
        self.loaded_state = loaded_state(self._job.framework, request, loaded)
        step, manifest = loaded.location.step, loaded.manifest
        if step is None:
            return
        self.loaded, self._newer = step, loaded.newer
        self.loads += 1
        self._origin = _LoadedStep(step, manifest.digest, manifest.timeline, self._saves())
        self.starts_over = False
        with GUARD:  # A drain moves the pin of the root on while its step is on this timeline.
            self._timeline = None
            for pins in self.pins:
                pins.current = (step, manifest.digest)
        self.base = base_from_loaded(manifest, loaded.index, loaded.filled)
        self.lineage = Lineage(Parent(manifest.run_id, step, manifest.digest), None)

    def move_on(self, step: int, *, leaves_records: bool) -> None:
        """Take a step as the position to which records were redone after the loaded base.

        Args:
            step: The last redone step; the base itself if there is no record.
            leaves_records: Whether training goes back: the log reaches further, and the next save leaves its timeline.
        """
        assert self._origin is not None, "a base was loaded"
        if step != self.loaded:
            self.loaded, self.loaded_state = step, None
            self._origin = replace(self._origin, redone=step)
        self._origin = replace(self._origin, leaves_records=leaves_records)

    @property
    def has_gone_back(self) -> bool:
        """Whether the last load left newer steps behind."""
        return bool(self._newer)

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the saves since the last load; None before the first of them."""
        return self._timeline

    @property
    def origin_step(self) -> int | None:
        """The step that was loaded last."""
        return None if self._origin is None else self._origin.step

    @property
    def origin(self) -> tuple[int, str] | None:
        """The step that was loaded last, and the digest of its manifest."""
        return None if self._origin is None else (self._origin.step, self._origin.digest)

    def is_loaded(self, step: int) -> bool:
        """Return whether a restart would resume from this step, because it was just loaded and is the newest."""
        leaves_records = self._origin is not None and self._origin.leaves_records
        return step == self.loaded and not self._newer and not leaves_records

    def timeline_for(self, step: int, epoch: int) -> Timeline:
        """Return the timeline of the next save. On rank 0, which holds the writer lease.

        Args:
            step: The step that is saved.
            epoch: The epoch of the writer lease.
        Raises:
            InvalidError: The root holds steps, and this manager has loaded none of them.
        """
        with self._deciding:  # Of saves on several threads the first decides.
            if self._timeline is None:
                origin = None if self.starts_over else self._origin
                stored = run_timelines(self._store) if origin is None else timelines_from(self._store, origin.step)
                self._timeline = self._decide(step, stored, epoch)
                self.starts_over = False
                self._last_number = max(self._last_number, self._timeline.number)
            return self._timeline

    def fork(self, stored: RunTimelines) -> Timeline:
        """Return a new timeline, which leaves that of the loaded step there. On rank 0, under the writer lease.

        Steps that a load discarded, and that the new timeline holds, are discarded no more.
        """
        assert self._origin is not None, "a step was loaded"
        number, new_id = self._new_number_and_id(stored)
        origin = self._origin
        timeline = stored.fork(origin.timeline, number, new_id, origin.at, origin.digest)
        if stored.recorded:
            # Before the timeline counts: once training has left it again, its steps are superseded, not discarded.
            held = (
                (manifest.step, str(manifest.digest))
                for manifest in stored.superseded
                if manifest.timeline is not None and timeline.holds(manifest.timeline.id, manifest.step)
            )
            take_back(self._store, current_fence(self._store), frozenset(held))
        return timeline

    def adopt(self, timeline: Timeline) -> None:
        """Take a timeline that has begun already as that of the next save."""
        self._timeline, self._last_number = timeline, max(self._last_number, timeline.number)

    def forget_newer(self) -> None:
        """Take note that a restart would resume from the loaded step: the newer ones are superseded."""
        self._newer = ()

    def _newer_than(self, stored: RunTimelines, chosen: StoredManifest) -> tuple[int, ...]:
        """Return the steps that a resume would load first, and those that a save in flight may still commit."""
        records = list_records(self._store)
        newer = {
            each.step for each in stored.newer_than(chosen) if not is_skipped(self._store, each.step, each.key, records)
        }
        return tuple(sorted(newer.union(pin.step for pin in self._saves() if pin.step > chosen.step)))

    def _decide(self, step: int, stored: RunTimelines, epoch: int) -> Timeline:
        origin = self._origin
        if self.starts_over or origin is None:
            is_empty = not stored.chain and not stored.superseded
            if is_empty and stored.newest == FIRST_TIMELINE:
                return FIRST_TIMELINE
            # A record may state a newer timeline, of which every step was removed: the first one would be superseded.
            if is_empty or self.starts_over:
                return Timeline(*self._new_number_and_id(stored))
            newest = first_three(manifest.step for manifest in reversed(stored.chain)) or "superseded ones only"
            raise InvalidError(
                f"{self._store.url}: holds committed steps ({newest}), and this manager has loaded none; a restart "
                "would mix two trainings. Nothing was saved. Call manager.load(state) first, save to another root, or "
                "start anew beside these steps with CheckpointManager(root, start_over=True)"
            )
        if self._is_at_end(step, origin, stored) or _begins_at(stored, origin):
            return stored.newest
        timeline = self.fork(stored)
        logger.warning(
            "%s: step %d was loaded and newer %s exist; this save begins timeline %d. The newer ones stay, superseded",
            self._store.url,
            origin.at,
            "steps or records" if origin.leaves_records else "steps",
            timeline.number,
        )
        move_damaged(self._store, origin.step, stored, epoch)
        return timeline

    def _is_at_end(self, step: int, origin: _LoadedStep, stored: RunTimelines) -> bool:
        """Return whether training continues the newest timeline: nothing that a resume would take first is left behind.

        A step below the loaded one also needs a new timeline: on the same one, a resume would load the higher number.
        """
        if all(stored.newest.id != timeline.id for timeline in stored.known):
            return False  # Only damaged manifests, or some under quarantine, state the newest timeline.
        if origin.leaves_records:
            return False
        at_origin = stored.at(origin.step)
        if at_origin is None or at_origin.timeline is None or at_origin.timeline.id != origin.timeline.id:
            return False
        in_flight = origin.in_flight & self._saves()
        return (
            not stored.newer_than(at_origin)
            and step >= origin.step
            and not any(other.step > origin.step for other in in_flight)
        )

    def _saves(self) -> frozenset[StepPin]:
        """Return the pins of the saves that are under way, or whose outcome is unknown."""
        return frozenset(pin for pins in self.pins for pin in pins.saves() if not pin.is_drain)

    def _new_number_and_id(self, stored: RunTimelines) -> tuple[int, str]:
        # A timeline of this process may have no committed step yet. Its number must not be used again.
        number = max(stored.newest.number, self._last_number) + 1
        return number, self._job.clock.random_bytes(_ID_BYTES).hex()


def _begins_at(stored: RunTimelines, origin: _LoadedStep) -> bool:
    """Return whether the newest timeline leaves at the loaded step and has no step yet: a load began it by a record."""
    fork = Fork(origin.timeline.id, origin.step, origin.digest)
    newest, known = stored.newest, {timeline.id for timeline in stored.known}
    return newest.id in stored.recorded and newest.id not in known and newest.ancestors[:1] == (fork,)


def move_damaged(store: Store, origin: int, stored: RunTimelines, epoch: int) -> None:
    """Move damaged manifests under quarantine above a step away from their steps, and out of `superseded/`.

    A damaged manifest does not state its timeline, so it would count as newer at every restart, and each restart would
    begin a timeline.
    """
    for manifest in stored.chain:
        if manifest.timeline is None and manifest.step > origin:
            try:
                supersede(store, manifest.step, epoch, manifest.key)
            except CheckpointError as error:
                logger.warning("step %d: its damaged manifest stays where it is: %s", manifest.step, error)
