"""Which steps of a loop are due where: at the root, near alone, or nowhere."""

from __future__ import annotations

from holdfast.base.types.reports import Tier
from holdfast.errors import InvalidError
from holdfast.policies import SavePolicy
from holdfast.training.coordination.job import Job
from holdfast.training.coordination.save_schedule import Schedule


class DueSteps:
    """The schedules of a run, on one rank: every rank decides equally."""

    def __init__(
        self, job: Job, url: str, root: SavePolicy | None, near: SavePolicy | None, *, heals: bool = False
    ) -> None:
        """Decide nothing yet.

        Args:
            job: The ranks.
            url: The root, for messages.
            root: When a step is due at the root; None if only calls of `save` say so.
            near: When a step is saved near; None without a near tier.
            heals: Whether the first step after a load is due near: the nodes that protected the loaded step may be
                lost, and the next save is protected by those of this job.
        """
        self._url = url
        self.root = None if root is None else Schedule(job, root)
        """Which steps are due at the root."""
        self._near = None if near is None else Schedule(job, near, "near")
        self._heals = heals
        self._loaded: int | None = None
        """The step that was loaded, until the next save."""

    def place_of(self, step: int) -> Tier | None:
        """Return where a step is due; None if nowhere. Equal on every rank that asked about the same steps."""
        is_due = [schedule is not None and schedule.is_due(step) for schedule in (self.root, self._near)]
        is_healing = self._heals and self._loaded not in (None, step)
        return "root" if is_due[0] else "near" if is_due[1] or is_healing else None

    def require_policy(self) -> None:
        """Refuse a loop that says nowhere when to save.

        Raises:
            InvalidError: The manager has no policy.
        """
        if self.root is None and self._near is None:
            raise InvalidError(
                f"{self._url}: maybe_save does not know when to save; expected a manager made with every=100 or "
                "save=…, as in CheckpointManager(root, every=100). To save at once, call save(step, state)"
            )

    def note_saved(self, step: int, *, near_only: bool) -> None:
        """Record that a save of a step begins. Call it on every rank at the same point of the loop."""
        self._loaded = None
        for schedule in (None if near_only else self.root, self._near):
            if schedule is not None:
                schedule.note_saved(step)

    def note_loaded(self, step: int) -> None:
        """Record that a step was loaded. Call it on every rank at the same point of the loop."""
        self._loaded = step
        for schedule in (self.root, self._near):
            if schedule is not None:
                schedule.note_loaded(step)
