"""The position of a process in a run: the step it loaded, the newer steps, and what the next save continues."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from holdfast.checkpoint.location import CheckpointLocation, require_no_checkpoint
from holdfast.coordination.job import Job
from holdfast.errors import CheckpointError, InvalidError, MissingError, first_three
from holdfast.format.names import MANIFEST_FILE, step_folder
from holdfast.loading.load import Loaded
from holdfast.loading.step_choice import ExactStep, NewestValid, StepSelector
from holdfast.repository.catalog import committed_steps, step_folders
from holdfast.repository.epochs import current_fence, fenced_error, is_valid
from holdfast.repository.quarantine import identity_at, list_records
from holdfast.runs.garbage_collection import Pins
from holdfast.saving.deduplication import BaseStep, base_from_loaded
from holdfast.types.manifest import Parent


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


class RunPosition:
    """The position of this process in a run, on one rank."""

    def __init__(self, job: Job, home: CheckpointLocation, pins: Pins) -> None:
        """Start before the first step.

        Args:
            job: The ranks.
            home: The root of the run.
            pins: Steps that garbage collection must leave alone.
        """
        self._job, self.home, self._store, self._pins = job, home, home.store, pins
        self.base: BaseStep | None = None
        """The last committed step that this rank saved or loaded. Set by the commit thread, and by loads."""
        self.lineage = Lineage(None, None)
        """The checkpoint, or the save in flight, that the next save continues."""
        self.loaded: int | None = None
        """The step that was loaded last; None once the state may have changed since."""
        self._newer: tuple[int, ...] = ()

    def location_of(self, step: int) -> CheckpointLocation:
        """Return the location of a step."""
        return replace(self.home, folder=step_folder(step), step=step)

    def selector(self, step: int | None) -> StepSelector:
        """Return the selector of a load: the given step, or the newest valid one."""
        # The load may fail because the base step is damaged: then the next save must not refer to it.
        self.base = None
        if step is None:
            return NewestValid(self.home, self._job.clock, self._job.is_first_occurrence)
        return ExactStep(partial(self._choose, step), partial(self._newer_than, step))

    def move_to(self, loaded: Loaded) -> None:
        """Take a loaded step as the position."""
        step, manifest = loaded.location.step, loaded.manifest
        if step is None:
            return
        self.loaded, self._newer = step, loaded.newer
        self._pins.has_gone_back = bool(self._newer)
        self._pins.current_step = step
        self.base = base_from_loaded(manifest, loaded.index, loaded.filled)
        self.lineage = Lineage(Parent(manifest.run_id, step, manifest.digest), None)

    def is_loaded(self, step: int) -> bool:
        """Return whether a restart would resume from this step, because it was just loaded and is the newest."""
        return step == self.loaded and not self._newer

    def require_not_gone_back(self) -> None:
        """Refuse to save after going back: a resume would load a newer step, and retention could delete the saved one.

        Raises:
            InvalidError: On every rank, because every rank knows the newer steps from the load.
        """
        if not self._newer:
            return
        assert self.loaded is not None, "a save after going back is refused, so the loaded step is still known"
        url = self.location_of(self.loaded).url
        newer = "a newer step exists" if len(self._newer) == 1 else f"{len(self._newer)} newer steps exist"
        raise InvalidError(
            f"{self._store.url}: step {self.loaded} was loaded, and {newer} ({first_three(self._newer)}); going back "
            f"within a root is not yet supported. Nothing was saved. To continue from step {self.loaded}, make a "
            f'CheckpointManager(new_root), call holdfast.load("{url}", state), and save with that manager. To continue '
            "from the newest step, call manager.load(state)"
        )

    def _choose(self, step: int) -> CheckpointLocation:
        require_no_checkpoint(self._store)
        location = self.location_of(step)
        try:
            is_fenced = not is_valid(self._store, current_fence(self._store), step)
        except MissingError as missing:
            newest = first_three(reversed(committed_steps(self._store))) or "none"
            raise MissingError(
                f"{self._store.url}: no committed step {step}; committed, newest first: {newest}. Choose one of them "
                "(holdfast ls lists all)"
            ) from missing
        if is_fenced:
            raise fenced_error(f"{location.url}/{MANIFEST_FILE}")
        return location

    def _newer_than(self, step: int) -> tuple[int, ...]:
        """Return the newer steps that a resume would load first, and those that a save in flight may still commit."""
        fence, damaged = current_fence(self._store), list_records(self._store)

        def is_candidate(newer: int) -> bool:
            identities = [identity for damaged_step, identity in damaged if damaged_step == newer]
            try:
                return is_valid(self._store, fence, newer) and not (
                    identities and identity_at(self._store, newer) in identities
                )
            except (MissingError, InvalidError):
                return False  # A resume skips it as well.
            except CheckpointError:
                # An unreadable newer step must not fail the load of this one. Saves are then refused.
                return True

        candidates = {newer for newer in step_folders(self._store) if newer > step and is_candidate(newer)}
        return tuple(sorted(candidates | {newer for newer in self._pins.under_way() if newer > step}))
