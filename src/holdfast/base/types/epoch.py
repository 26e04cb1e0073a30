"""Epochs: which process may write to the root of a run, and which checkpoints of former writers count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.base.types.timeline import Fork


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds an epoch."""

    host: str
    """Name of its machine, for people."""

    boot: str
    """Id of the boot of that machine; empty if the system has none."""

    namespaces: str
    """The namespaces of process id and start; these identify a process only within them."""

    pid: int
    """Its process id."""

    started: int
    """Its start, in clock ticks since the boot; distinguishes it from a later process of the same id."""

    since: str
    """Wall-clock time at which it took the epoch, ISO 8601 in UTC, for people."""

    nonce: str
    """Random, 32 hex digits; distinguishes two managers of one process."""

    lease_seconds: float
    """Longest time without a heartbeat, in seconds; after it another process may take over."""

    def __str__(self) -> str:
        """Return host, process and start, for messages."""
        return f"host {self.host}, process {self.pid}, since {self.since}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """The time in which one process may write to a run."""

    number: int
    """From 1 on. The next epoch has the next number."""

    run_id: str
    """The run."""

    holder: Holder
    """The process that created it."""

    former_ended: bool = False
    """Whether its holder knew that no process writes under the epoch before: that one was released, or its process had
    exited."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Which manifests of a run count: those of the newest epoch, and those it accepted when it began."""

    epoch: int = 0
    """The newest epoch with a list of accepted manifests; 0 if there is none, so that every manifest is valid."""

    accepted: Mapping[int, str | None] = field(default_factory=dict)
    """Digest of the accepted manifest, by step; None if it could not be read, so that any is accepted."""

    superseded: frozenset[tuple[int, str]] = frozenset()
    """Step and digest of accepted manifests that made room for a manifest of a newer timeline."""

    has_timelines: bool = False
    """Whether the list is one that readers without timelines refuse."""

    parents: Mapping[str, Fork] = field(default_factory=dict)
    """Where timelines leave their parents, by id: of chains that are too long for a manifest."""

    def admits(self, step: int, epoch: int, digest: str) -> bool:
        """Return whether a manifest counts.

        Args:
            step: Its step.
            epoch: The epoch under which it was published; 0 if none.
            digest: Its digest.
        """
        if epoch >= self.epoch or (step, digest) in self.superseded:
            return True
        return step in self.accepted and self.accepted[step] in (None, digest)
