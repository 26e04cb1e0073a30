"""Timelines: which steps of a run belong together, after training went back to an older step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """The step at which a timeline leaves an older one."""

    timeline: str
    """Id of the older timeline; empty for the first one."""

    step: int
    """Last step of the older timeline that belongs to the chain."""

    digest: str
    """Digest of the manifest of that step."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One timeline of a run.

    A run begins on the first timeline. A process that loads step S and saves again, although newer steps exist, begins
    a further one. Its chain is its own steps, and the steps of each ancestor up to the fork. A resume takes the newest
    step of the chain of the newest timeline; all other steps are superseded.
    """

    number: int = 1
    """Timelines of a run are numbered in the order in which they began, from 1 on."""

    id: str = ""
    """16 random hex digits; empty for the first timeline."""

    ancestors: tuple[Fork, ...] = ()
    """Older timelines of the chain, the parent first; empty for the first timeline, and after a start from scratch."""

    def holds(self, timeline: str, step: int) -> bool:
        """Return whether a step of a timeline, given by its id, belongs to the chain of this one."""
        return timeline == self.id or any(fork.timeline == timeline and step <= fork.step for fork in self.ancestors)

    def contradicts(self, other: Timeline) -> bool:
        """Return whether two timelines cannot be of one run: number or id is the same, and something else differs."""
        return self != other and (self.number == other.number or self.id == other.id)

    def fork(self, number: int, new_id: str, step: int, digest: str) -> Timeline:
        """Return a timeline that leaves this one at a step of it.

        Args:
            number: Number of the new timeline.
            new_id: Its id.
            step: The step that training continues from. It is of this timeline, not of an ancestor.
            digest: Digest of the manifest of that step.
        """
        return Timeline(number, new_id, (Fork(self.id, step, digest), *self.ancestors))


FIRST_TIMELINE = Timeline()
"""The timeline of every step whose manifest states none."""
