"""What one look at a run finds: its steps, why some stay, and what no step needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from holdfast.base.ports.readable import StoreTraits
from holdfast.base.types.removal import StepAndDigest, StepFiles, Unreferenced, steps_of
from holdfast.core.format.names import superseded_key
from holdfast.stored.repository import removal
from holdfast.stored.repository.publish import packs_named_by
from holdfast.stored.repository.timeline_records import TimelineRecord, ended_records
from holdfast.stored.repository.timelines import MovedManifests
from holdfast.training.runs.removal.chosen_steps import Chosen, name_of
from holdfast.training.runs.removal.reachability import unreferenced


@dataclass(frozen=True, slots=True)
class Inventory:
    """The steps of a run, why some stay, and what no step needs."""

    run_id: str
    """The run."""

    standing: Mapping[int, str]
    """Steps with a valid manifest, each with the digest of it."""

    reasons: Mapping[int, tuple[str, ...]]
    """Steps that stay, each with the reasons."""

    unreferenced: Unreferenced
    """Steps and files that may be removed."""

    bare: tuple[int, ...]
    """Steps with empty folders only."""

    packs: Mapping[StepAndDigest, frozenset[str]] = field(default_factory=dict)
    """Packs that each of the manifests to remove names."""

    protected: Mapping[StepAndDigest, tuple[str, ...]] = field(default_factory=dict)
    """Chosen steps that stay for now, each with the reasons."""

    records: Sequence[TimelineRecord] = ()
    """The records of timelines."""

    timelines: Mapping[StepAndDigest, int] = field(default_factory=dict)
    """Number of the timeline of each manifest that counts and can be read."""

    linked: frozenset[str] = frozenset()
    """Packs that go although steps name them: each of these steps has a link."""

    holding: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Steps that go or are gone and hold packs of others, each with these."""

    def packs_without(self, manifests: Set[StepAndDigest]) -> frozenset[str]:
        """Return the packs that the manifests to remove name, all but some of these manifests."""
        return frozenset().union(*(packs for name, packs in self.packs.items() if name not in manifests))


@dataclass(frozen=True, slots=True)
class Found:
    """What one look at the run found."""

    listed: Sequence[StepFiles]
    moved: MovedManifests
    chosen: Chosen
    under_way: frozenset[int]
    wanted_packs: frozenset[str]
    traits: StoreTraits
    packs_known: bool

    def unreferenced(self, reasons: Collection[int], begun: frozenset[int] | None) -> Unreferenced:
        """Return what no step needs.

        Args:
            reasons: Steps that stay.
            begun: None to list everything. Otherwise what would go without the chosen steps too is left out, except in
                the folders of these steps: a collection may have been killed at them.
        """
        going = self.chosen.going
        staying = self._without(reasons, self.chosen.staying(self.moved))
        moved = {
            superseded_key(*name_of(manifest)): name_of(manifest)
            for manifest in self.moved.manifests
            if name_of(manifest) in going
        }
        found = replace(staying, moved=moved)
        if begun is None:
            return found
        others = self._without({*reasons, *(step for step, _ in going)}, self.moved)
        return found.without(others.outside(begun))

    def packs_of(self, to_delete: Unreferenced) -> dict[StepAndDigest, frozenset[str]]:
        """Return the packs that each of the manifests to remove names."""
        going = to_delete.manifests
        standing = {
            (files.step, files.digest): files.packs
            for files in self.listed
            if files.digest is not None and files.counts and (files.step, files.digest) in going
        }
        moved = {name_of(each): packs_named_by([each]) for each in self.moved.manifests if name_of(each) in going}
        return {**standing, **moved}

    def _without(self, reasons: Collection[int], moved: MovedManifests) -> Unreferenced:
        return unreferenced(
            [_with_attempts_of(moved, files) for files in self.listed],
            {*reasons, *self.under_way},
            self.under_way,
            removal.is_pack_key,
            self.wanted_packs | packs_named_by(moved.manifests),
            packs_known=self.packs_known,
            attempts_stay_whole=self.traits.has_parity,
        )


def ended_in(inventory: Inventory, removed: Unreferenced) -> list[str]:
    """Return the keys of the records of timelines that nobody needs, given what was removed since the inventory."""
    going = inventory.unreferenced
    unclean = steps_of(key for key in going.files if key not in removed.files)
    return ended_records(
        [record for record in inventory.records if unclean.isdisjoint(step for step, _ in record.discarded)],
        inventory.timelines,
        removed.manifests,
        going.manifests,
    )


def _with_attempts_of(moved: MovedManifests, files: StepFiles) -> StepFiles:
    """Return the files of a step, with the attempts pinned that moved manifests name."""
    named = moved.attempts(files.step, files.attempts)
    return replace(files, pinned=files.pinned | named) if named else files
