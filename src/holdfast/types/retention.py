"""What retention decides by, and the name that a person gives a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for one step of a run."""

    name: str
    """The name."""

    step: int
    """The step it was given to."""

    digest: str
    """That of the step's manifest: a step removed and saved again is another."""

    created: str
    """Wall-clock time, ISO 8601 in UTC, for people."""


@dataclass(frozen=True, slots=True)
class KeptFacts:
    """What is known of a whole step when it is decided which are kept."""

    step: int
    """The step."""

    created: str = ""
    """The time its manifest tells; steps are grouped by it, never ordered."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loop said of it."""

    tags: tuple[str, ...] = ()
    """Its tags."""

    healthy: bool | None = None
    """Whether nothing was found against it while it was saved; None where nothing was looked at."""
