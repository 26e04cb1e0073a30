"""What was found of a checkpoint's health while it was saved: values that are no finite numbers, copies that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Expectation = Literal["parameter", "optimizer", "buffer", "expected"]
"""What a tensor with non-finite values is for. Of a parameter and of optimizer state they are always news; of a buffer
where no count of it in an earlier checkpoint is known they are taken as meant; where the caller expects them, never
news."""

Counted = Mapping[str, tuple[int, Expectation]]
"""By FQN of each tensor in which one rank found non-finite elements: how many, and what it is for."""

NAMED_RANKS_MAX = 64
"""Ranks that are named of one tensor at most."""

_TOLD_MAX = 20
"""Tensors that are told of in words at most."""


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """What one rank holds together with the same other ranks."""

    holders: bytes
    """8-byte digest of the ranks that hold it."""

    positions: tuple[int, ...]
    """Which tensors, as positions in the names of its speaker; ascending."""

    digests: bytes
    """8 bytes for each: the digest of everything that the rank holds of it."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """What one rank says of the copies it holds."""

    host: str
    """Where it runs, for people."""

    speaker: int
    """The rank whose statement has the names: the lowest of its class."""

    names: tuple[str, ...]
    """FQNs of all tensors of the class, in its order; from the speaker only."""

    groups: tuple[ReplicaGroup, ...]
    """What it holds, by who else holds it."""


@dataclass(frozen=True, slots=True)
class Health:
    """What was looked at of a checkpoint, and what was found."""

    nonfinite: Mapping[str, int] | None = None
    """Elements that are NaN or infinite, by FQN where there are any; None: not counted."""

    new: Mapping[str, int] = field(default_factory=dict)
    """Of those the ones that have more than the last checkpoint in which they were not new, and how many that had."""

    divergent: Mapping[str, tuple[int, ...]] | None = None
    """Ranks whose copy differs from most others, by FQN, the first `NAMED_RANKS_MAX`; None: not compared."""

    undecided: tuple[str, ...] = ()
    """FQNs among `divergent` of which no copy has a majority: all holders are named."""

    hosts: Mapping[int, str] = field(default_factory=dict)
    """Where the ranks named run, for people."""

    def told(self) -> tuple[str, ...]:
        """Return what speaks against the checkpoint, in words, a tensor each; the first of many."""
        counts = self.nonfinite or {}
        said = [f"{_shown(fqn)}: {counts[fqn]} non-finite elements, {had} before" for fqn, had in self.new.items()]
        for fqn, ranks in (self.divergent or {}).items():
            where = _listed(
                [f"{rank} ({_shown(self.hosts[rank])})" if rank in self.hosts else str(rank) for rank in ranks]
            )
            if fqn in self.undecided:
                said.append(
                    f"{_shown(fqn)}: the copies of ranks {where} differ, and none has a majority: which is right is "
                    "unknown"
                )
            elif len(ranks) == 1:
                said.append(f"{_shown(fqn)}: the copy of rank {where} differs from most others")
            else:
                said.append(f"{_shown(fqn)}: the copies of ranks {where} differ from most others")
        more = len(said) - _TOLD_MAX
        return tuple([*said[:_TOLD_MAX], f"and {more} more tensors"] if more > 0 else said)


def _shown(fqn: str) -> str:
    """Return a name that steers no terminal it is printed on."""
    return fqn if fqn.isprintable() else repr(fqn)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def is_healthy(health: Health | None) -> bool | None:
    """Return whether nothing was found against a checkpoint; None where nothing was looked at."""
    if health is None:
        return None
    return not health.new and not health.divergent
