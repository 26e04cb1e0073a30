"""What verifying finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as it was saved."""

    file: str
    """Key of the file, relative to the checkpoint; of a referenced file its URL."""

    start: int | None
    """First damaged byte known, or None for the whole file."""

    stop: int | None
    """Byte past the damage, or None."""

    fqn: str | None
    """Tensor it belongs to, or None."""

    message: str
    """What was expected and what was found."""
