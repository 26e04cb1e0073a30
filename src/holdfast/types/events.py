"""What an observer hears of: saves and loads as they go, and what each rank did in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verb = Literal["save", "load"]
Fact = int | float | str | bool

_MOVING = frozenset({"write", "read", "exchange"})
"""Phases in which a rank's bytes move between memory and storage, or other ranks."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One save or load, on one rank."""

    verb: Verb
    """Which of the two."""

    step: int | None
    """The step; None for a checkpoint saved by path, and for a load that failed before one was chosen."""

    url: str
    """Where the checkpoint lies; of a load that failed before one was chosen, where it was looked for."""

    rank: int
    """The rank."""

    world_size: int
    """Ranks that save or load together."""

    @property
    def name(self) -> str:
        """The operation, for people."""
        return f"{self.verb} of {self.url}" if self.step is None else f"{self.verb} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an operation. Phases of one rank may overlap: copies are written while others are made."""

    name: str
    """What was done; docs/observing.md lists the names."""

    start_seconds: float
    """When it began, after the operation did."""

    seconds: float
    """How long it took."""

    @property
    def stop_seconds(self) -> float:
        """When it ended, after the operation began."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did in one save or load."""

    operation: Operation
    """The save or load."""

    id: str
    """16 hex digits that all its ranks share: of a save, its attempt."""

    host: str
    """Name of the rank's machine."""

    pid: int
    """Number of its process."""

    began_unix_seconds: float
    """When the call came, by the wall clock: for people, and to lay ranks beside each other."""

    seconds: float
    """From the call until it was done, on this rank."""

    phases: tuple[Phase, ...]
    """What it did meanwhile, by when it began."""

    bytes: int
    """Bytes of tensors that this rank wrote, or read from storage."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    """The rest of its `SaveReport` or `LoadReport`, by name of the field; of names that are listed there, how many."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes by the time in which they were moved; 0 where none were."""
        seconds = sum(phase.seconds for phase in self.phases if phase.name in _MOVING)
        return self.bytes / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Began:
    """A save or load has begun; of a load it is told once its step is known."""

    operation: Operation
    """The save or load."""

    unix_seconds: float
    """When the call came, by the wall clock."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A phase has begun."""

    operation: Operation
    """The save or load."""

    phase: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Some of the bytes are done; told now and then."""

    done_bytes: int
    """Bytes done."""

    total_bytes: int
    """Bytes in all."""

    operation: Operation | None = None
    """The save or load; None for other work: an import, an export, a comparison, a verification."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A save is committed, or a load has filled the state."""

    report: RankReport
    """What this rank did."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A save or load has failed."""

    operation: Operation
    """The save or load."""

    error: str
    """Name of the error's type."""

    message: str
    """What it says."""

    began_unix_seconds: float
    """When the call came, by the wall clock."""

    seconds: float
    """From the call until it failed."""

    phases: tuple[Phase, ...]
    """What it did meanwhile, by when it began; none where a load goes on with another step: its end tells all."""

    has_begun: bool = True
    """Whether `Began` was told: not of a load that found no step."""


Event = Began | Entered | Progress | Ended | Failed
