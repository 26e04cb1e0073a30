"""Epochs: who may write to the root of a run, and which checkpoints of former writers count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that an epoch belongs to."""

    host: str
    """Name of its machine, for people."""

    boot: str
    """Id of the boot of that machine; empty where the system tells none."""

    namespaces: str
    """The namespaces in which process id and start mean something."""

    pid: int
    """Its process id."""

    started: int
    """When it started, in clock ticks since the boot: tells it from a later process of the same id."""

    since: str
    """Wall-clock time at which it took the epoch, ISO 8601 in UTC, for people."""

    nonce: str
    """Random, 32 hex digits: tells two managers of one process apart."""

    lease_seconds: float
    """How long it may give no sign of life and still hold the epoch."""

    def __str__(self) -> str:
        """Return who it is, for messages."""
        return f"host {self.host}, process {self.pid}, since {self.since}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One generation of writers of a run."""

    number: int
    """From 1 on, without gaps."""

    run_id: str
    """The run."""

    holder: Holder
    """Who created it."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Which manifests of a run count: those of the newest epoch, and those it accepted when it began."""

    epoch: int = 0
    """The newest epoch that has said what it accepts; 0 where there is none, and everything counts."""

    accepted: Mapping[int, str | None] = field(default_factory=dict)
    """Step to digest of the manifest that was accepted there; None where it could not be told: any is."""

    def admits(self, step: int, epoch: int, digest: str) -> bool:
        """Return whether a manifest counts.

        Args:
            step: The step it lies at.
            epoch: The epoch under which it was published; 0 if none.
            digest: Its digest.
        """
        return epoch >= self.epoch or (step in self.accepted and self.accepted[step] in (None, digest))
