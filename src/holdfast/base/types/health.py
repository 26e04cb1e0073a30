"""The health of a checkpoint, as its save found it: non-finite elements, and replicas that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from holdfast.errors import first_three

Expectation = Literal["parameter", "optimizer", "buffer", "expected"]
"""Role of a tensor with non-finite values. In a parameter or optimizer state they always count as new. In a buffer they
do not if no earlier count is known. In a tensor of `nonfinite_expected` they never do."""

Counted = Mapping[str, tuple[int, Expectation]]
"""By FQN of each tensor in which one rank found non-finite elements: how many, and the tensor's role."""

NAMED_RANKS_MAX = 64
"""Ranks recorded for one tensor at most."""

LINES_MAX = 20
"""Tensors that `findings_of` lists at most."""


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Tensors that one rank holds together with the same other ranks."""

    holders: bytes
    """8-byte digest of the list of those ranks."""

    positions: tuple[int, ...]
    """The tensors, as positions in the names that `speaker` sent; ascending."""

    digests: bytes
    """8 bytes for each tensor: the digest of this rank's part of it."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Digests of the copies that one rank holds."""

    host: str
    """Its host, for people."""

    speaker: int
    """The rank that sends the names: the lowest of its class."""

    names: tuple[str, ...]
    """FQNs of all tensors of the class, in its order; only sent by the speaker."""

    groups: tuple[ReplicaGroup, ...]
    """Its tensors, grouped by the ranks that hold them too."""


@dataclass(frozen=True, slots=True)
class Health:
    """The checks of a save, and their findings."""

    nonfinite: Mapping[str, int] | None = None
    """Number of NaN and infinite elements, by FQN of each tensor with any; None: not counted."""

    new: Mapping[str, int] = field(default_factory=dict)
    """Tensors with more such elements than the last checkpoint in which they were not new, and its number."""

    divergent: Mapping[str, tuple[int, ...]] | None = None
    """Ranks whose copy differs from most others, by FQN, at most `NAMED_RANKS_MAX`; None: not compared, or only in
    samples that are equal."""

    undecided: tuple[str, ...] = ()
    """FQNs in `divergent` without a majority among the copies; their ranks are all holders."""

    hosts: Mapping[int, str] = field(default_factory=dict)
    """Hosts of those ranks, for people."""


def with_drift(health: Health | None, drift: Health | None) -> Health | None:
    """Return a health with the replicas whose samples differ; a comparison of whole copies finds more in these."""
    if drift is None or drift.divergent is None:
        return health
    if health is None:
        return drift
    compared = health.divergent or {}
    undecided = {*health.undecided, *(fqn for fqn in drift.undecided if fqn not in compared)}
    divergent = {**drift.divergent, **compared}
    return replace(health, divergent=dict(sorted(divergent.items())), undecided=tuple(sorted(undecided)))


def is_healthy(health: Health | None) -> bool | None:
    """Return whether a save found nothing wrong; None if it checked nothing."""
    if health is None:
        return None
    return not health.new and not health.divergent


def findings_of(health: Health | None) -> tuple[str, ...]:
    """Return what a save found wrong: a line for each tensor, of the first `LINES_MAX` tensors, without control
    characters.
    """
    if health is None:
        return ()
    counts = health.nonfinite or {}
    lines = [f"{_shown(fqn)}: {counts[fqn]} non-finite elements, {before} before" for fqn, before in health.new.items()]
    for fqn, ranks in (health.divergent or {}).items():
        names = [f"{rank} ({_shown(health.hosts[rank])})" if rank in health.hosts else str(rank) for rank in ranks]
        if fqn in health.undecided:
            lines.append(
                f"{_shown(fqn)}: the copies of ranks {first_three(names)} differ, and none has a majority: the right "
                "one is unknown"
            )
        elif len(ranks) == 1:
            lines.append(f"{_shown(fqn)}: the copy of rank {names[0]} differs from most others")
        else:
            lines.append(f"{_shown(fqn)}: the copies of ranks {first_three(names)} differ from most others")
    more = len(lines) - LINES_MAX
    return (*lines[:LINES_MAX], f"and {more} more tensors") if more > 0 else tuple(lines)


def _shown(fqn: str) -> str:
    """Return a name without characters that control a terminal."""
    return fqn if fqn.isprintable() else repr(fqn)
