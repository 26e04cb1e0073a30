"""The context of one save: rank 0 decides it, and every rank receives it with the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.format.health import decode_health, encode_health
from holdfast.types.health import Health

Base = tuple[int, str]
"""A committed step, and the digest of its manifest."""


@dataclass(frozen=True, slots=True)
class SaveContext:
    """Rank 0's decisions on one save. The verdict that closes the agreement carries them."""

    run_id: str
    """Id of the run that the root belongs to; an id of its own for a checkpoint saved by path."""

    created: str
    """Wall-clock time, ISO 8601 in UTC, for people."""

    epoch: int = 0
    """Epoch of the writer lease under which the manifest is published; 0 for a checkpoint saved by path."""

    base: Base | None = None
    """The step whose pieces may be referred to. Garbage collection keeps it until the save ends."""

    suspect_steps: frozenset[int] = frozenset()
    """Steps whose packs may be damaged, so that no save may refer to them."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Rank 0's metrics of the step."""

    origin: str | None = None
    """For a copy: software that wrote the source, with its version."""

    masters: Mapping[str, str] = field(default_factory=dict)
    """For a copy: FQN of each fp32 master by FQN of its low-precision weight, as in the source."""

    health: Health | None = None
    """For a copy: health recorded with the source."""

    def encode(self) -> dict[str, object]:
        """Return the context as a JSON object."""
        return {
            "run_id": self.run_id,
            "created": self.created,
            "epoch": self.epoch,
            "base": self.base,
            "suspect_steps": sorted(self.suspect_steps),
            "metrics": dict(self.metrics),
            "origin": self.origin,
            "masters": dict(self.masters),
            "health": None if self.health is None else encode_health(self.health),
        }

    @classmethod
    def decode(cls, document: Mapping[str, Any]) -> SaveContext:
        """Return the context that `encode` wrote; rank 0 is trusted, so nothing is checked."""
        base = document["base"]
        return cls(
            run_id=document["run_id"],
            created=document["created"],
            epoch=document["epoch"],
            base=None if base is None else (base[0], base[1]),
            suspect_steps=frozenset(document["suspect_steps"]),
            metrics=document["metrics"],
            origin=document["origin"],
            masters=document["masters"],
            health=decode_health(document["health"], "save context"),
        )
