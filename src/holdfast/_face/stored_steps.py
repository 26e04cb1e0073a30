"""What a manager tells of the stored steps of its run, and does with them: lists, tags, distrusts."""

from __future__ import annotations

from holdfast.base.ports.store import Store
from holdfast.errors import InvalidError
from holdfast.policies import KeepPolicy
from holdfast.stored.repository.tags import remove_tag
from holdfast.stored.repository.timelines import committed_steps, run_timelines
from holdfast.training.coordination.job import Job
from holdfast.training.runs.run_parts import RunParts
from holdfast.training.runs.tags import tag_step
from holdfast.training.runs.tiers.distrust import distrust
from holdfast.training.runs.tiers.near import NearTier


class StoredSteps:
    """The stored steps of a run; the base of `CheckpointManager`, which sets the attributes."""

    _run: Store
    """The root, or the near tier and the root as one."""

    _job: Job
    _parts: RunParts
    _keep: KeepPolicy | None
    _near: NearTier | None

    def steps(self) -> list[int]:
        """Return the committed steps that a load may take, ascending, without superseded steps.

        Example:
            assert manager.steps() == [100, 200, 300]
        """
        return committed_steps(self._run)

    @property
    def latest(self) -> int | None:
        """The newest committed step of the newest timeline, or None.

        Example:
            assert manager.latest == 300
        """
        chain = run_timelines(self._run).chain
        return chain[-1].step if chain else None

    def tag(self, step: int | str, name: str, *, move: bool = False) -> None:
        """Tag a committed step; do nothing if the step has the tag already. Call this method on one rank.

        A superseded step is named by number and digest, as `300@1f2e`. With `move`, the step gets the tag also if
        another step has it: at any time, and after a crash, one of the two steps has the tag.

        Example:
            manager.tag(300, "best", move=True)
        Raises:
            InvalidError: The name is not a valid tag: a number, `latest`, or other characters.
            MissingError: There is no such step.
            ConflictError: Another step has the tag and `move` is False, or the step is being deleted.
        """
        tag_step(self._run, self._job.clock, step, name, move=bool(move))
        if self._near is not None:
            self._near.drain.look_at_tags()

    def untag(self, name: str) -> None:
        """Remove a tag; the step does not change. Call this method on one rank.

        Example:
            manager.untag("best")
        Raises:
            MissingError: There is no such tag.
        """
        remove_tag(self._run, name)

    def distrust(self, reason: str) -> None:
        """Put the step that was loaded last into quarantine, since training went wrong after the load.

        The first call concerns the near copy, so the next load takes the step from the root; a further call after that
        load the root's copy, so a load takes the step before. Every rank may call this method; rank 0 decides.

        Example:
            manager.distrust("the loss is not finite")
        Raises:
            InvalidError: No step was loaded.
            MissingError: Every copy is in quarantine already.
        """
        loaded = self._parts.position.origin
        if loaded is None:
            raise InvalidError(f"{self._run.url}: distrust, and no step was loaded; expected a load before")
        if self._job.comm.rank == 0:
            distrust(self._run, self._job.clock, *loaded, reason)

    def kept(self) -> dict[int, tuple[str, ...]]:
        """Return the steps that garbage collection would keep now, each with the reasons. Read-only.

        Example:
            for step, reasons in manager.kept().items():
                print(step, ", ".join(reasons))
        Raises:
            InvalidError: `keep` ranks by a metric that no step has.
            CorruptError: A tag cannot be read and may name a step that must stay.
        """
        return self._parts.kept(self._keep)
