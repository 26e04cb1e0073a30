"""Steps that go although their manifests may be moved: named for removal, discarded by a load, or left by the policy.

No policy keeps them, nor does the rule that the newest step of a former timeline stays. They stay for now while a
tag, a reader, a save or this process needs them. A discarded step also stays while it is under quarantine; one that was
named goes with its record. Their manifests may be in the folders of their steps or under `superseded/`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest
from holdfast.base.types.timeline import Timeline
from holdfast.stored.repository.quarantine import QuarantineRecord
from holdfast.stored.repository.tags import Tags
from holdfast.stored.repository.timeline_records import TimelineRecord
from holdfast.stored.repository.timelines import MovedManifests
from holdfast.training.runs.removal.pins import Pins


@dataclass(frozen=True, slots=True)
class ChosenNames:
    """What one collection removes beside what the policy leaves."""

    names: frozenset[StepAndDigest] = frozenset()
    """Steps that were named for removal."""

    overruled_tags: frozenset[tuple[str, StepAndDigest]] = frozenset()
    """Tags that keep none of them, each with the step that it names. It may have moved to another one since."""

    is_all: bool = False
    """Whether nothing else goes: no remains of dead saves either."""

    begun: frozenset[int] = frozenset()
    """Steps whose manifests a removal that did not end has removed. What is left in their folders goes too."""

    request: str = ""
    """Key of the mark that holds what a person named. Whoever has put it removes it."""

    def keeps(self, record: QuarantineRecord) -> bool:
        """Return whether the files of a manifest under quarantine stay: nobody named its step for removal."""
        return all((step, digest[:16]) != (record.step, record.identity) for step, digest in self.names)


NOTHING_CHOSEN = ChosenNames()


@dataclass(frozen=True, slots=True)
class Needs:
    """What may need a chosen step."""

    tags: Tags
    """All tags."""

    readers: Mapping[int | None, str]
    """Readers by step; None for one that may read any step."""

    quarantine: Mapping[int, Mapping[str, QuarantineRecord]]
    """Records by step and identity."""

    pins: Pins
    """What this process needs."""

    def is_quarantined(self, manifest: Manifest) -> bool:
        """Return whether a manifest or its attempt is under quarantine."""
        records = self.quarantine.get(name_of(manifest)[0], {})
        return manifest.digest[:16] in records or any(
            manifest.attempt in record.attempts for record in records.values()
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen steps that are stored."""

    going: frozenset[StepAndDigest] = frozenset()
    """Those that may go now."""

    protected: Mapping[StepAndDigest, tuple[str, ...]] = field(default_factory=dict)
    """Those that stay for now, each with the reasons."""

    def staying(self, moved: MovedManifests) -> MovedManifests:
        """Return the manifests under `superseded/` without those that go."""
        kept = (each for each in moved.manifests if name_of(each) not in self.going)
        return replace(moved, manifests=tuple(kept))


def name_of(manifest: Manifest) -> StepAndDigest:
    """Return the name of the step of a manifest of a run."""
    assert manifest.step is not None, "a run holds steps"
    return manifest.step, manifest.digest


def discarded_in(records: Iterable[TimelineRecord]) -> frozenset[int]:
    """Return the steps that loads have discarded."""
    return frozenset(step for record in records for step, _ in record.discarded)


def judged(
    choice: ChosenNames,
    manifests: Iterable[Manifest],
    records: Collection[TimelineRecord],
    newest: Timeline,
    needs: Needs,
) -> Chosen:
    """Return which chosen steps go, and why others stay.

    Args:
        choice: What was named.
        manifests: Every manifest of the run that can be read.
        records: The records of timelines; they name what loads discarded.
        newest: The newest timeline. Training may have gone on from a discarded step since: what its chain holds stays.
        needs: What may need a chosen step.
    """
    discarded = frozenset().union(*(record.discarded for record in records))
    going, protected = set[StepAndDigest](), dict[StepAndDigest, tuple[str, ...]]()
    for manifest in manifests:
        name = name_of(manifest)
        is_left = name in discarded and not newest.holds(manifest.timeline.id, name[0])
        if name not in choice.names and not is_left:
            continue
        why = _needed_by(manifest, name, choice, needs)
        if why:
            protected[name] = why
        else:
            going.add(name)
    return Chosen(frozenset(going), protected)


def undecided(
    manifests: Mapping[int, Manifest | None],
    elsewhere: Iterable[Manifest],
    known: Collection[int],
    needs: Needs,
    chosen: Chosen,
) -> dict[StepAndDigest, Manifest]:
    """Return the manifests that the policy decides about, by step and digest.

    Args:
        manifests: Those in the folders of steps; None for one that cannot be read.
        elsewhere: Those under `superseded/` alone.
        known: Steps that stay for another reason.
        needs: What is under quarantine.
        chosen: The chosen steps.
    """
    whole = [manifest for step, manifest in manifests.items() if manifest is not None and step not in known]
    whole += [manifest for manifest in elsewhere if not needs.is_quarantined(manifest)]
    return {name_of(manifest): manifest for manifest in whole if name_of(manifest) not in chosen.going}


def left_by_policy(moved: Iterable[Manifest], kept: Collection[StepAndDigest], needs: Needs) -> set[StepAndDigest]:
    """Return which manifests under `superseded/` go because no policy keeps them, and nothing else needs them.

    Args:
        moved: Those that count.
        kept: Those that stay.
        needs: What may need one.
    """
    names = ((name_of(manifest), manifest) for manifest in moved)
    return {name for name, each in names if name not in kept and not _needed_by(each, name, NOTHING_CHOSEN, needs)}


def _needed_by(manifest: Manifest, name: StepAndDigest, choice: ChosenNames, needs: Needs) -> tuple[str, ...]:
    step, digest = name
    tags = [tag for tag in needs.tags.of(step, digest) if (tag, name) not in choice.overruled_tags]
    reader = needs.readers.get(step, needs.readers.get(None))
    is_set_aside = name not in choice.names and needs.is_quarantined(manifest)
    return (
        *(f"tag {tag}" for tag in sorted(tags)),
        *([] if reader is None else [f"read by {reader}"]),
        *(["under quarantine"] if is_set_aside else []),
        *(["a save under way needs it"] if step in needs.pins.needed() else []),
        *(["the run goes on from it"] if name == needs.pins.current else []),
    )
