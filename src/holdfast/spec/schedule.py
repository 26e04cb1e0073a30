"""What the ranks of a job know of time and requests while they decide whether to save a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What was saved last; the same on every rank after the same steps."""

    step: int | None = None
    """The last step of which a save began, or that was loaded; None if there is none."""

    seconds: float | None = None
    """When a save last began, as the announcement in force said, or else when the loop did; None before its first step
    of which time was told."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What rank 0 tells every rank, ahead of the steps it is for: those after the one before it, up to `until`."""

    until: int
    """The last step it is for."""

    seconds: float
    """Monotonic time on rank 0, for these steps as if it stood still."""

    requested: int | None = None
    """The latest step at which a rank asked for a save, as far as rank 0 knows; None if none did."""

    standing: Standing | None = None
    """What rank 0 stood at, with which every rank begins; in the first announcement of a loop only."""
