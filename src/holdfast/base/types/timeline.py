"""Timelines: which steps of a run belong together, after training went back to an older step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

ANCESTORS_STATED = 16
"""Ancestors that a manifest states, the nearest ones: a manifest must not grow each time that training goes back."""


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
        """Return whether two timelines cannot be of one run: number or id is the same, and something else differs.

        One manifest may state more ancestors of a timeline than another.
        """
        if (self.number, self.id) != (other.number, other.id):
            return self.number == other.number or self.id == other.id
        stated = min(len(self.ancestors), len(other.ancestors))
        is_same = self.ancestors == other.ancestors or stated >= ANCESTORS_STATED
        return not is_same or self.ancestors[:stated] != other.ancestors[:stated]

    def fork(self, number: int, new_id: str, step: int, digest: str) -> Timeline:
        """Return a timeline that leaves this one at a step of it.

        Args:
            number: Number of the new timeline.
            new_id: Its id.
            step: The step that training continues from. It is of this timeline, not of an ancestor.
            digest: Digest of the manifest of that step.
        """
        return Timeline(number, new_id, (Fork(self.id, step, digest), *self.ancestors))

    def completed(self, parents: Mapping[str, Fork]) -> Timeline:
        """Return this timeline with all its ancestors, though a manifest states only the nearest ones.

        Args:
            parents: Where each timeline leaves its parent, by id.
        """
        if len(self.ancestors) < ANCESTORS_STATED:
            return self
        ancestors = {fork.timeline: fork for fork in self.ancestors}
        last = self.ancestors[-1].timeline
        while last in parents and parents[last].timeline not in ancestors:
            fork = parents[last]
            ancestors[fork.timeline], last = fork, fork.timeline
        return replace(self, ancestors=tuple(ancestors.values()))


def parents_in(timelines: Iterable[Timeline]) -> dict[str, Fork]:
    """Return where each timeline leaves its parent, by id, as far as some timelines state it."""
    parents: dict[str, Fork] = {}
    for timeline in timelines:
        ids = (timeline.id, *(fork.timeline for fork in timeline.ancestors))
        parents |= zip(ids, timeline.ancestors, strict=False)
    return parents


FIRST_TIMELINE = Timeline()
"""The timeline of every step whose manifest states none."""
