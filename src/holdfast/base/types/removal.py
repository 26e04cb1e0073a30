"""What garbage collection found in a run: the files of each step, and what no step needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

StepAndDigest = tuple[int, str]
"""A step and the digest of its manifest."""


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
    """Whether the manifest counts. One that a replaced writer published does not."""

    attempts: Mapping[str, Mapping[str, int]]
    """Files of each attempt: bytes by key."""

    reports: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the reports of saves and loads, by key."""

    packs: frozenset[str] = frozenset()
    """Packs that the manifest names, by their path from the root."""

    pinned: frozenset[str] = frozenset()
    """Attempts under quarantine. They stay, whatever the policy says."""

    manifest_bytes: int = 0
    """Size of its manifest, as listed; 0 if it was not."""

    @property
    def holds_anything(self) -> bool:
        """Whether the folder holds a manifest or a file of a save."""
        return self.digest is not None or any(self.attempts.values()) or bool(self.reports)


@dataclass(frozen=True, slots=True)
class Unreferenced:
    """The steps and files that no step needs."""

    steps: Mapping[int, str] = field(default_factory=dict)
    """Steps whose manifest may go, each with the digest of the manifest."""

    files: Mapping[str, int] = field(default_factory=dict)
    """Files that no step needs once these steps are gone: bytes by key."""

    moved: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Manifests under `superseded/` that may go: step and digest by key. Only those that somebody chose."""

    def __bool__(self) -> bool:
        """Return whether there is a step or file."""
        return bool(self.steps or self.files or self.moved)

    @property
    def manifests(self) -> frozenset[tuple[int, str]]:
        """Step and digest of every manifest that may go."""
        return frozenset((*self.steps.items(), *self.moved.values()))

    @property
    def numbers(self) -> frozenset[int]:
        """The steps of these manifests."""
        return frozenset(step for step, _ in self.manifests)

    def without(self, other: Unreferenced) -> Unreferenced:
        """Return the steps and files that another one does not list."""
        return Unreferenced(
            {step: digest for step, digest in self.steps.items() if (step, digest) not in other.manifests},
            {key: size for key, size in self.files.items() if key not in other.files},
            {key: name for key, name in self.moved.items() if name not in other.manifests},
        )

    def without_files(self, keys: frozenset[str]) -> Unreferenced:
        """Return the steps, and the files that are not among some."""
        return replace(self, files={key: size for key, size in self.files.items() if key not in keys})

    def with_files(self, files: Mapping[str, int]) -> Unreferenced:
        """Return the steps and files with further files: bytes by key."""
        return replace(self, files={**self.files, **files}) if files else self

    def joined(self, others: Iterable[Unreferenced]) -> Unreferenced:
        """Return the steps and files that any of several lists."""
        steps, files, moved = dict(self.steps), dict(self.files), dict(self.moved)
        for other in others:
            steps |= other.steps
            files |= other.files
            moved |= other.moved
        return Unreferenced(steps, files, moved)

    def confirmed_by(self, later: Unreferenced) -> Unreferenced:
        """Return the steps and files that a later inventory lists too. A manifest may have moved since."""
        named = self.manifests
        return Unreferenced(
            {step: digest for step, digest in later.steps.items() if (step, digest) in named},
            {key: size for key, size in self.files.items() if key in later.files},
            {key: name for key, name in later.moved.items() if name in named},
        )

    def outside(self, steps: frozenset[int]) -> Unreferenced:
        """Return this without the files in the folders of some steps."""
        inside = {key for key in self.files if not steps_of([key]).isdisjoint(steps)} if steps else set[str]()
        return replace(self, files={key: size for key, size in self.files.items() if key not in inside})


def steps_of(keys: Iterable[str]) -> frozenset[int]:
    """Return the steps in whose folders files are, from their keys under the root of a run; segments are in none."""
    folders = {key.partition("/")[0] for key in keys}
    return frozenset(int(folder.removeprefix("step-")) for folder in folders if folder.startswith("step-"))
