"""What a run tells of itself, one JSON line per event, so that a killed run has still told everything before."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


class Journal:
    """The writing end; only rank 0 holds one that writes.

    Args:
        path: File to write, or None to stay silent.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path is not None else None

    def tell(self, event: str, **facts: object) -> None:
        """Write one event."""
        if self._file is not None:
            print(json.dumps({"event": event, **facts}), file=self._file, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a run held in memory at one moment."""

    step: int = 0
    """The last step it had trained."""

    digests: dict[str, str] = field(default_factory=dict)
    """Digest of every whole tensor by name."""

    values: dict[str, object] = field(default_factory=dict)
    """Plain values as text."""


@dataclass(slots=True)
class Story:
    """The reading end: what one run told."""

    losses: dict[int, str] = field(default_factory=dict)
    """Loss by step, as an exact hexadecimal float."""

    saved: dict[int, Memory] = field(default_factory=dict)
    """What was in memory when a save began, by step."""

    loaded: Memory = field(default_factory=Memory)
    """What was in memory right after loading."""

    end: Memory = field(default_factory=Memory)
    """What was in memory when the run ended by itself."""


def read(path: Path) -> Story:
    """Return what a run told; a last line cut short by a kill is left out."""
    story = Story()
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        fact = json.loads(line)
        match fact.pop("event"):
            case "loss":
                story.losses[fact["step"]] = fact["loss"]
            case "save":
                story.saved[fact["step"]] = Memory(**fact)
            case "loaded":
                story.loaded = Memory(**fact)
            case "end":
                story.end = Memory(**fact)
    return story
