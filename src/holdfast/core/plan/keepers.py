"""Rules of the keepers, the agents that hold the manifests of a near tier: their answers in, a decision out.

A keeper may be lost, cut off, or come back with manifests that no longer count. So an acknowledged manifest is on two
keepers, or on the only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class NoManifest(Enum):
    """Answer of a keeper that names no manifest."""

    ABSENT = "absent"
    """The keeper has no manifest of the step."""

    SILENT = "silent"
    """The keeper did not answer. A put may have been carried out."""

    BEHIND = "behind"
    """The keeper has an older mark: the writer tells it the admission first."""

    NEWER = "newer"
    """The keeper has a newer mark: another writer took over."""


class PutOutcome(Enum):
    """Outcome of a put of a manifest."""

    STORED = "stored"
    """The manifest counts, and survives the loss of any one node."""

    CONFLICT = "conflict"
    """Nothing was stored: another manifest of the step or a newer mark was there first."""

    UNKNOWN = "unknown"
    """The manifest may count or not. The writer may put the same one again, and no other one of the step."""


def quorum(keepers: int) -> int:
    """Return how many keepers of a roster must hold a manifest before it is acknowledged.

    Args:
        keepers: Keepers of the roster, reachable or not.
    """
    return min(keepers, 2)


def put_outcome(mine: object, answers: Sequence[object], keepers: int) -> PutOutcome:
    """Return the outcome of a put-if-absent.

    The writer asks in roster order, until a keeper has another manifest of the step or a newer mark.

    Args:
        mine: The manifest, or another object that is put at one key.
        answers: One per keeper that was asked; `SILENT` for a keeper that was not reached.
        keepers: Keepers of the roster, asked or not.
    """
    stored = answers.count(mine)
    if stored >= quorum(keepers) and NoManifest.NEWER not in answers:
        return PutOutcome.STORED
    was_first = any(each not in (mine, NoManifest.SILENT, NoManifest.BEHIND, NoManifest.ABSENT) for each in answers)
    is_certain = was_first and not stored and NoManifest.SILENT not in answers
    return PutOutcome.CONFLICT if is_certain else PutOutcome.UNKNOWN
