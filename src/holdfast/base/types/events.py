"""The events that observers receive, and each rank's report of a save or load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.base.types.coding import KindCoding, KindDecision

Verb = Literal["save", "load", "drain"]
Fact = int | float | str | bool

_MOVING = frozenset({"write", "read", "exchange", "send"})
"""Phases in which a rank's bytes move between memory and storage, or other ranks."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One save, load or drain of a step to the root, on one rank."""

    verb: Verb
    """Whether it saves, loads or drains."""

    step: int | None
    """The step; None for a checkpoint saved by path, and for a load that failed before one was chosen."""

    url: str
    """URL of the checkpoint; for a load that failed before a step was chosen, URL of the run."""

    rank: int
    """The rank."""

    world_size: int
    """Ranks that work together."""

    @property
    def name(self) -> str:
        """The operation, for people."""
        return f"{self.verb} of {self.url}" if self.step is None else f"{self.verb} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of an operation. Phases of one rank may overlap: copies are written while others are made."""

    name: str
    """Its name; docs/observing.md lists all names."""

    start_seconds: float
    """Its start, in seconds after the start of the operation."""

    seconds: float
    """Its duration."""

    @property
    def stop_seconds(self) -> float:
        """Its end, in seconds after the start of the operation."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did in one save or load."""

    operation: Operation
    """The save or load."""

    id: str
    """16 hex digits that all ranks share: for a save, its attempt."""

    host: str
    """Name of the rank's machine."""

    pid: int
    """Number of its process."""

    began_unix_seconds: float
    """Wall-clock time of the call, for people and to align ranks in a trace."""

    seconds: float
    """Seconds from the call until the end on this rank."""

    phases: tuple[Phase, ...]
    """Its phases, in order of their start."""

    bytes: int
    """Bytes of tensors that this rank wrote, or read from storage; of a drain, bytes of files that it copied."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Other fields of its `SaveReport` or `LoadReport`, by name; the length of fields that are lists of names."""

    codings: tuple[KindCoding, ...] = ()
    """How it stored each kind of tensors, and why: the 16 largest kinds. Empty for a load, and without compression."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of the phases that move bytes; 0 without such phases."""
        seconds = sum(phase.seconds for phase in self.phases if phase.name in _MOVING)
        return self.bytes / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Began:
    """A save, load or drain has begun. For a load it is sent once the step is known."""

    operation: Operation
    """The save or load."""

    unix_seconds: float
    """Wall-clock time of the call."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A phase has begun."""

    operation: Operation
    """The save or load."""

    phase: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A save has decided which kinds of tensors it codes; sent before it writes, if compression is not off."""

    operation: Operation
    """The save."""

    decisions: Mapping[str, KindDecision]
    """The decision on each kind, such as `float32 exp_avg`, with its reason."""

    predicted_seconds: float | None
    """How long this rank is expected to write; None if that is unknown."""

    unix_seconds: float
    """Wall-clock time of the decision."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Some of the bytes are done; sent from time to time."""

    done_bytes: int
    """Bytes done."""

    total_bytes: int
    """Bytes in all."""

    operation: Operation | None = None
    """The save or load; None for other work: an import, an export, a comparison, a verification."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A save is committed, a load has filled the state, or the root has a drained step."""

    report: RankReport
    """The report of this rank."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A save or load has failed, or a try to drain a step."""

    operation: Operation
    """The save or load."""

    error: str
    """Name of the error's type."""

    message: str
    """The error's message."""

    began_unix_seconds: float
    """Wall-clock time of the call."""

    seconds: float
    """Seconds from the call until it failed."""

    phases: tuple[Phase, ...]
    """Its phases, in order of their start. Empty if a load continues with another step; its last event has all."""

    has_begun: bool = True
    """Whether `Began` was sent; not for a load that found no step."""


@dataclass(frozen=True, slots=True)
class LogSealed:
    """A rank has made records of the redo log durable, together in one segment."""

    step: int
    """Step of the last of these records."""

    url: str
    """URL of the run."""

    rank: int
    """The rank."""

    records: int
    """Number of the records."""

    bytes: int
    """Bytes of the segment."""

    waited_seconds: float
    """Seconds that training has waited for memory of the log since the segment before."""

    recoverable: int | None
    """The last step to which a restart would come back, as far as this rank knows; None before the first base."""


@dataclass(frozen=True, slots=True)
class LogInterrupted:
    """A rank has lost a record of the redo log: from this step on a failure costs the steps since the last base."""

    step: int
    """The step whose record is lost."""

    url: str
    """URL of the run."""

    rank: int
    """The rank."""

    why: str
    """The reason."""

    unix_seconds: float
    """Wall-clock time."""


@dataclass(frozen=True, slots=True)
class LogRedone:
    """A load has redone the records after a base."""

    step: int
    """The step that the state holds now."""

    url: str
    """URL of the run."""

    rank: int
    """The rank."""

    base: int
    """The step of the base."""

    records: int
    """Number of records that were redone."""

    seconds: float
    """How long redoing took."""

    unix_seconds: float
    """Wall-clock time of the end."""


@dataclass(frozen=True, slots=True)
class DrainSkipped:
    """A due step is not drained, because the root would not keep the step. Rank 0 sends the event."""

    step: int
    """The step."""

    url: str
    """URL of the root."""

    rank: int
    """The rank."""

    why: str
    """The reason."""

    unix_seconds: float
    """Wall-clock time."""


@dataclass(frozen=True, slots=True)
class StepProtected:
    """A step in a near tier of peers is protected, or is not. Rank 0 sends the event."""

    step: int
    """The step."""

    url: str
    """URL of the near tier."""

    rank: int
    """The rank."""

    seconds: float
    """Seconds since the nodes were asked."""

    why: str
    """Why the step is not protected; empty if the loss of any one node loses nothing."""

    unix_seconds: float
    """Wall-clock time."""


LogEvent = LogSealed | LogInterrupted | LogRedone
TierEvent = DrainSkipped | StepProtected
Event = Began | Entered | Decided | Progress | Ended | Failed | TierEvent | LogEvent
