"""The timelines of a run as a tree: where training went back, and the steps that going back left behind. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.base.types.manifest import Parent
from holdfast.base.types.timeline import Fork
from holdfast.training.runs.listing import RunRecord, StepRecord


@dataclass(frozen=True, slots=True)
class TimelineBranch:
    """One timeline of a run."""

    number: int
    """Number of the timeline."""

    fork: Fork | None
    """Where the timeline leaves the one before; None for the first one, and after a start from scratch."""

    origin: Parent | None
    """The checkpoint of another run from which the first step went on; None without one."""

    steps: tuple[StepRecord, ...]
    """The steps that were saved on this timeline, ascending. Some may be superseded or discarded."""

    branches: list[TimelineBranch] = field(default_factory=list)
    """The timelines that leave this one."""


def lineage(run: RunRecord) -> list[TimelineBranch]:
    """Return the timelines of a run as trees, the oldest first. Needs no torch.

    Example:
        for timeline in holdfast.api.lineage(holdfast.api.list_steps("run-7")):
            print(timeline.number, [step.name for step in timeline.steps], len(timeline.branches))
    """
    steps: dict[str, list[StepRecord]] = {}
    for record in run.steps:
        if record.manifest is not None:
            steps.setdefault(record.manifest.timeline.id, []).append(record)
    timelines = {id_: records[0].manifest.timeline for id_, records in steps.items() if records[0].manifest}
    found: dict[str, TimelineBranch] = {}
    for id_, timeline in sorted(timelines.items(), key=lambda item: item[1].number):
        first = steps[id_][0].manifest
        parent = None if first is None else first.parent
        origin = parent if parent is not None and run.run_id is not None and parent.run_id != run.run_id else None
        fork = next(iter(timeline.ancestors), None)
        found[id_] = TimelineBranch(timeline.number, fork, origin, tuple(steps[id_]))
    roots: list[TimelineBranch] = []
    for branch in found.values():
        above = None if branch.fork is None else found.get(branch.fork.timeline)
        (roots if above is None or above is branch else above.branches).append(branch)
    return roots
