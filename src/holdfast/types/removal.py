"""What garbage collection found in a run: the files of each step, and what no step needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The files in the folder of one step."""

    step: int
    """The step."""

    digest: str | None
    """Digest of its manifest; None without a manifest. For an unreadable manifest, a text that identifies it."""

    attempt: str | None
    """The attempt that the manifest names; None if there is no readable manifest."""

    counts: bool
    """Whether readers take the manifest; one that was published by a replaced writer counts for nothing."""

    attempts: Mapping[str, Mapping[str, int]]
    """Bytes by key, of what each attempt put there."""

    reports: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the reports of saves and loads, by key."""

    packs: frozenset[str] = frozenset()
    """Packs that the manifest names, by their path from the root."""

    pinned: frozenset[str] = frozenset()
    """Attempts that stay whatever the policy says: they are under quarantine."""

    @property
    def holds_anything(self) -> bool:
        """Whether anything of a save is left there."""
        return self.digest is not None or any(self.attempts.values()) or bool(self.reports)


@dataclass(frozen=True, slots=True)
class Unreferenced:
    """What is to be removed from a run."""

    steps: Mapping[int, str] = field(default_factory=dict)
    """Steps that lose their manifest, each with the digest of it."""

    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes by key of what nobody needs once these are gone."""

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.steps or self.files)

    def confirmed_by(self, later: Unreferenced) -> Unreferenced:
        """Return what a later look finds doomed as well."""
        return Unreferenced(
            {step: digest for step, digest in self.steps.items() if later.steps.get(step) == digest},
            {key: size for key, size in self.files.items() if key in later.files},
        )
