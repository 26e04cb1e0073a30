"""The context of one save: rank 0 decides it, and every rank receives it with the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.base.types.health import Health
from holdfast.base.types.timeline import FIRST_TIMELINE, Timeline

Base = tuple[int, str]
"""A committed step, and the digest of its manifest."""


@dataclass(frozen=True, slots=True)
class Overwrite:
    """What a save may replace at its path."""

    claim: str
    """Nonce of the claim that the job holds on the checkpoint."""

    seen: str
    """Identity of the manifest that rank 0 saw there; empty if there was none."""

    attempts: tuple[str, ...] = ()
    """Attempts of this job that were under way: a manifest of one of them may be replaced too."""


@dataclass(frozen=True, slots=True)
class SaveContext:
    """Rank 0's decisions on one save. The verdict that closes the agreement carries them."""

    run_id: str
    """Id of the run that the root belongs to; an id of its own for a checkpoint saved by path."""

    created: str
    """Wall-clock time, ISO 8601 in UTC, for people."""

    epoch: int = 0
    """Epoch of the writer lease under which the manifest is published; 0 for a checkpoint saved by path."""

    timeline: Timeline = FIRST_TIMELINE
    """Timeline of the run that the step belongs to."""

    base: Base | None = None
    """The step whose pieces may be referred to. Garbage collection keeps it until the save ends."""

    suspect_steps: frozenset[int] | None = frozenset()
    """Steps whose packs may be damaged, so that no save may refer to them. None: rank 0 has not looked, since a
    reference was not likely. A rank that finds one looks itself."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Rank 0's metrics of the step."""

    place: Literal["", "near", "root"] = ""
    """In a run with a near tier: `near` for a step that stays near; `root` if the near tier has no room, so that the
    save goes on in the root."""

    loaded: Base | None = None
    """The committed step that every rank holds as it was loaded: nothing is written."""

    origin: str | None = None
    """For a copy: software that wrote the source, with its version."""

    masters: Mapping[str, str] = field(default_factory=dict)
    """For a copy: FQN of each fp32 master by FQN of its low-precision weight, as in the source."""

    health: Health | None = None
    """For a copy: health recorded with the source."""

    overwrite: Overwrite | None = None
    """For a save that may overwrite: what it may replace."""
