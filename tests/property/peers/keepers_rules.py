"""Rules of keepers that are fenced by marks: those that the store of all nodes asks, and those of decision 114.

A keeper may be lost, cut off, or come back with manifests that no longer count. The root decides which manifests count,
and numbers each such decision: the mark. Each request states a mark, and each keeper stores the newest mark that the
keeper has learned. A keeper that learns a mark drops the manifests that do not count, and fetches those that do. A
keeper refuses requests of another mark. So a keeper takes no manifest of a writer that was replaced, and gives no
manifest that was removed.

An acknowledged manifest is on two keepers, or on the only one. A new job has each keeper that it reaches learn the new
epoch and list its manifests. The job copies each manifest that counts to two of its own keepers, and then puts the list
at the root. From then on keepers learn the admission of that list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.types.epoch import Fence
from holdfast.core.plan.keepers import NoManifest, PutOutcome, put_outcome, quorum
from holdfast.errors import ConflictError, UnavailableError

__all__ = ["NoManifest", "PutOutcome", "put_outcome", "quorum"]

Mark = tuple[int, int]
"""Epoch and revision of an admission: a greater mark is a newer decision of the root."""

NO_MARK: Mark = (0, 0)
"""Mark of a keeper with an empty folder."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A manifest that a keeper holds."""

    step: int
    """Its step."""

    epoch: int
    """The epoch under which it was published."""

    digest: str
    """Its digest."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The root's decision on which manifests count."""

    fence: Fence
    """The list of the newest epoch."""

    revision: int
    """Number of the decision within the epoch: 0 until the list is put, then one more with each removal."""

    excluded: frozenset[tuple[int, str]] = frozenset()
    """Step and digest of manifests that were removed, or left by going back, since the list was put."""

    @property
    def mark(self) -> Mark:
        """Epoch and revision."""
        return self.fence.epoch, self.revision

    def admits(self, kept: Kept) -> bool:
        """Return whether a manifest counts."""
        is_excluded = (kept.step, kept.digest) in self.excluded
        return not is_excluded and self.fence.admits(kept.step, kept.epoch, kept.digest)


Answer = Kept | NoManifest
"""Answer of one keeper: after a put, the manifest that it then holds."""


def refusal(own: Mark, asked: Mark) -> NoManifest | None:
    """Return how a keeper refuses a request; None: the keeper carries it out.

    Args:
        own: Newest mark that the keeper has learned.
        asked: Mark that the request states.
    """
    return None if own == asked else NoManifest.BEHIND if own < asked else NoManifest.NEWER


def may_put(step: int, admission: Admission, tried: Iterable[Kept]) -> bool:
    """Return whether a writer may put a manifest of a step: it has put no other one that may still count.

    Args:
        step: The step.
        admission: The newest decision of the root.
        tried: Manifests that the writer has put before, with any outcome.
    """
    accepted = admission.fence.accepted
    is_listed = step in accepted and (step, accepted[step]) not in admission.excluded
    return not is_listed and not any(kept.step == step and admission.admits(kept) for kept in tried)


def may_learn(own: Mark, offered: Mark) -> bool:
    """Return whether a keeper takes a mark, with the admission that goes with the mark.

    A keeper whose memory was lost may have forgotten a newer mark. So a keeper learns the first mark from a new job,
    before that job's list, and never from a writer: another one may have replaced that writer.

    Args:
        own: Newest mark that the keeper has learned.
        offered: The mark of a new job or of a writer.
    """
    return offered > own and (own != NO_MARK or offered[1] == 0)


def read(answers: Sequence[Answer]) -> tuple[Kept | None, list[int]]:
    """Return the first manifest of a step in roster order, if there is one, and the positions of keepers without it.

    The reader puts the manifest there, under the mark of the read: a keeper that learned a newer mark since refuses.

    Args:
        answers: One per keeper of the roster, in roster order.
    Raises:
        ConflictError: A keeper has a newer mark.
        UnavailableError: Too few keepers answered to say that the step is absent.
    """
    if NoManifest.NEWER in answers:
        raise ConflictError("a keeper knows a newer epoch: another writer took over. End this job")
    found = next((each for each in answers if isinstance(each, Kept)), None)
    lacking = [number for number, each in enumerate(answers) if each is NoManifest.ABSENT]
    if found is None and len(lacking) < quorum(len(answers)):
        raise UnavailableError(
            f"{len(lacking)} of {len(answers)} keepers answered; expected {quorum(len(answers))}, to say that a step "
            "is absent. Start the agents of the others, or read from the root"
        )
    return found, lacking if found is not None else []


def settled(held: Iterable[Kept], admission: Admission) -> frozenset[Kept]:
    """Return one manifest for each step: among those that count, that of the newest epoch, then the greatest digest.

    A keeper that learns a newer mark keeps these of its own manifests and those of the other keepers, and drops the
    rest. A new job takes these of all manifests that it has listed.

    Args:
        held: Manifests of any steps.
        admission: The newest decision of the root.
    """
    by_step: dict[int, Kept] = {}
    for kept in sorted(filter(admission.admits, held), key=lambda kept: (kept.epoch, kept.digest)):
        by_step[kept.step] = kept
    return frozenset(by_step.values())


def too_few_copies(listed: Iterable[Kept], holdings: Sequence[Collection[Kept]]) -> list[Kept]:
    """Return the manifests that a new job must still copy before its list may be put at the root.

    Args:
        listed: Manifests that the list will name.
        holdings: Manifests of each keeper of the new roster; empty for a keeper that was not reached.
    """
    return [kept for kept in listed if sum(kept in held for held in holdings) < quorum(len(holdings))]
