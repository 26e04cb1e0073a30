"""Garbage collection: removes the steps and files that no retention policy, tag, reader or save needs.

One collection, in order; any error ends it, and the next commit begins again:

    survey     Take an inventory. Nothing unreferenced: done.
    marked     A mark on storage lists what is to go. Readers and tags that come now see it.
    grace      Wait, so that readers that came before the mark store their leases.
    carried    The mark says that removal begins: from here a reader of a listed step fails.
    confirmed  Take a second inventory. Only what both inventories list is removed.
    removed    Steps first, then files. The mark is deleted, also after an error.

Only the holder of the writer lease collects. The policy decides about superseded steps like about others, and the
newest step of each timeline stays. Manifests under `superseded/` stay, with all files that they name. Steps that were
chosen go, whatever the policy says and wherever their manifests are: see `chosen_steps.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.checkpoint.location import require_no_checkpoint
from holdfast.clock import Clock
from holdfast.errors import CorruptError, MissingError, first_three
from holdfast.format.names import RUN_FILE, superseded_key
from holdfast.leases.reader import ReaderLeases
from holdfast.leases.writer import WriterLease, hold_writer_lease
from holdfast.policies import KeepPolicy
from holdfast.ports.store import Store
from holdfast.repository import removal
from holdfast.repository.catalog import read_run_id, step_folders
from holdfast.repository.epochs import current_fence
from holdfast.repository.publish import packs_named_by
from holdfast.repository.quarantine import QuarantineRecord, quarantined, superseded_packs
from holdfast.repository.tags import Tags, read_tags
from holdfast.repository.timeline_records import TimelineRecord, ended_records, timeline_records
from holdfast.repository.timelines import MovedManifests, moved_manifests, newest_timeline
from holdfast.runs.collection.chosen_steps import (
    NOTHING_CHOSEN,
    Chosen,
    ChosenNames,
    Needs,
    StepName,
    discarded_in,
    judged,
    name_of,
)
from holdfast.runs.collection.reachability import unreferenced
from holdfast.runs.collection.retention import KeptFacts, kept
from holdfast.runs.known_steps import KnownSteps
from holdfast.runs.pins import Pins
from holdfast.runs.torn_steps import torn_steps
from holdfast.types.epoch import Fence
from holdfast.types.manifest import Manifest
from holdfast.types.removal import StepFiles, Unreferenced, steps_of
from holdfast.types.timeline import Timeline

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16


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

    protected: Mapping[StepName, tuple[str, ...]]
    """Chosen steps that stay for now, each with the reasons."""

    records: Sequence[TimelineRecord]
    """The records of timelines."""

    timelines: Mapping[StepName, int]
    """Number of the timeline of each manifest that counts and can be read."""


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection removed and kept."""

    reasons: Mapping[int, tuple[str, ...]]
    """Steps that stay, each with the reasons."""

    steps: tuple[int, ...]
    """Steps that were removed, or would be. Steps without a valid manifest are not listed: no reader saw them."""

    files: int
    """Number of files that were removed, or would be, without manifests."""

    bytes: int
    """Their bytes."""

    superseded: tuple[str, ...] = ()
    """Superseded steps that were removed, or would be, because somebody chose them: number and digest, `300@1f2e`."""

    protected: Mapping[StepName, tuple[str, ...]] = field(default_factory=dict)
    """Chosen steps, by number and digest, that stay for now, each with the reasons."""


class CheckpointGC:
    """Finds what a run does not need, and removes it if it has the writer lease."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        keep: KeepPolicy | None,
        writer_lease: WriterLease | None,
        pins: Pins | None = None,
        choice: ChosenNames = NOTHING_CHOSEN,
    ) -> None:
        """Read nothing yet.

        Args:
            store: The root of the run.
            clock: Measures leases, and gives the nonce of the mark.
            keep: The retention policy; None keeps every step, so that only files no step needs are removed.
            writer_lease: The lease of this process; None to take inventories only.
            pins: The steps that saves of this process need.
            choice: The steps that go, whatever the policy says.
        """
        self._store, self._clock, self._keep, self._writer_lease = store, clock, keep, writer_lease
        self._pins, self._choice = Pins() if pins is None else pins, choice
        self._readers = ReaderLeases(store, clock)
        self._known = KnownSteps(store)
        self._warned: set[str] = set()

    @property
    def url(self) -> str:
        """The URL of the root."""
        return self._store.url

    def collect(self, grace_seconds: float, wait: Callable[[float], bool]) -> CollectReport | None:
        """Remove what is unreferenced; return the report, or None if it was stopped.

        Args:
            grace_seconds: How long marked steps stay, for readers that came before the mark.
            wait: Waits for some seconds; returns whether the collection shall stop.
        Raises:
            ConflictError: Another process took over the run.
            CorruptError: A record that decides what stays is damaged; nothing was removed.
            UnavailableError: Storage failed; call again.
        """
        assert self._writer_lease is not None, "only the holder of the writer lease removes"
        first = self.survey()
        removal.remove_folders(self._store, first.bare)
        # These marks are of ended collections: only the holder of the writer lease runs a collection.
        removal.remove_marks(self._store, [*removal.mark_keys(self._store), *_ended(first, Unreferenced())])
        if not first.unreferenced:
            return _report(first, Unreferenced())
        nonce, epoch = self._clock.random_bytes(_NONCE_BYTES).hex(), self._writer_lease.epoch
        put_mark = partial(removal.put_mark, self._store, first.run_id, nonce, epoch, first.unreferenced)
        mark = put_mark(is_carried_out=False)
        try:
            if wait(grace_seconds):
                return None
            put_mark(is_carried_out=True)
            return self._carried_out(first)
        finally:
            # After an error too: without the mark, the steps that stay can be read again.
            removal.remove_marks(self._store, [mark.key])

    def _carried_out(self, first: Inventory) -> CollectReport:
        assert self._writer_lease is not None, "only the holder of the writer lease removes"
        second = self.survey()
        _require_all_listed(self._store, first, second, self._pins.under_way())
        to_delete = first.unreferenced.confirmed_by(second.unreferenced)
        free = self._pins.release_for_removal(to_delete.numbers)
        try:
            if free != to_delete.numbers:
                # A save pinned one of them meanwhile: a new inventory finds the files that it needs.
                second = self.survey()
                to_delete = to_delete.confirmed_by(second.unreferenced)
            self._writer_lease.require()
            to_delete = removal.remove(self._store, to_delete, self._writer_lease.epoch)
            self._store.delete(_ended(second, to_delete))
        finally:
            self._pins.release_for_removal(frozenset())
        return _report(second, to_delete)

    def survey(self) -> Inventory:
        """Return the inventory of the run.

        Raises:
            CorruptError: The record of the run or a tag is damaged, so what must stay is unknown.
            InvalidError: The policy ranks by a metric that no step has.
            UnavailableError: Storage failed.
        """
        store = self._store
        run_id = require_run(store)
        fence, quarantine = current_fence(store), quarantined(store)
        # Before the steps are listed: a save that ends during the listing then still counts as under way.
        under_way, needed = self._pins.under_way(), self._pins.needed()
        all_files, manifests, reasons = self._inspected(fence, quarantine)
        # After the folders: a manifest that moves meanwhile is then in one of the two lists.
        moved = moved_manifests(store)
        newest = newest_timeline(store, fence, manifests, moved)
        records, tags = timeline_records(store, fence), _whole_tags(store)
        needs = Needs(tags, self._readers.holds(forget=self._writer_lease is not None), quarantine, self._pins)
        whole = [manifest for manifest in (*manifests.values(), *_counted(moved, fence)) if manifest is not None]
        chosen = judged(self._choice, whole, records, newest, needs)
        reasons |= self._kept(manifests, reasons, all_files, newest, needs, chosen)
        for step in needed & manifests.keys():
            reasons[step] = (*reasons.get(step, ()), "a save under way needs it")
        current = self._pins.current
        if current is not None and _is_at(manifests, current):
            reasons.setdefault(current[0], ("the run goes on from it",))
        unread = sorted({step for step, manifest in manifests.items() if manifest is None} | moved.unreadable)
        self._warn_of_unread(unread)
        listed = self._known.with_files_to_delete(all_files, {*reasons, *under_way}, fence)
        found = _Found(listed, moved, chosen, under_way, superseded_packs(store), packs_known=not unread)
        return Inventory(
            run_id,
            {files.step: files.digest for files in listed if files.digest is not None and files.counts},
            reasons,
            found.unreferenced(reasons, discarded_in(records) if self._choice.is_all else None),
            tuple(files.step for files in listed if not files.holds_anything and files.step not in under_way),
            chosen.protected,
            records,
            {name_of(manifest): manifest.timeline.number for manifest in whole},
        )

    def _inspected(
        self, fence: Fence, quarantine: Mapping[int, Mapping[str, QuarantineRecord]]
    ) -> tuple[list[StepFiles], dict[int, Manifest | None], dict[int, tuple[str, ...]]]:
        """Return the files of each step folder, the manifests that count, and why damaged ones stay."""
        all_files: list[StepFiles] = []
        manifests: dict[int, Manifest | None] = {}
        reasons: dict[int, tuple[str, ...]] = {}
        folders = step_folders(self._store)
        self._known.forget_all_but(folders)
        for step in folders:
            records = {
                identity: record for identity, record in quarantine.get(step, {}).items() if self._choice.keeps(record)
            }
            pinned = {attempt for record in records.values() for attempt in record.attempts}
            files, manifest, strangers = self._known.inspect(step, fence, pinned)
            all_files.append(files)
            for key in strangers:
                self.warn_once("%s/%s: no file of a save; it is not removed", self._store.url, key)
            if files.digest is None or not files.counts:
                continue
            manifests[step] = manifest
            if manifest is None:
                reasons[step] = ("its manifest cannot be read",)
            elif files.digest[:16] in records or manifest.attempt in pinned:
                reasons[step] = ("under quarantine",)
        return all_files, manifests, reasons

    def _warn_of_unread(self, steps: Sequence[int]) -> None:
        if steps:
            self.warn_once(
                "no pack is removed while the manifests of steps [%s] cannot be read: they may refer to any. Run: "
                "holdfast repair %s",
                first_three(steps),
                self._store.url,
            )

    def _kept(
        self,
        manifests: Mapping[int, Manifest | None],
        known: Mapping[int, tuple[str, ...]],
        all_files: Sequence[StepFiles],
        newest: Timeline,
        needs: Needs,
        chosen: Chosen,
    ) -> Mapping[int, tuple[str, ...]]:
        """Return why further steps stay: the policy or a tag keeps them, or a reader has a lease on them."""
        tags = needs.tags
        candidates = {
            step: manifest
            for step, manifest in manifests.items()
            if manifest is not None and step not in known and (step, manifest.digest) not in chosen.going
        }
        reasons = dict(torn_steps(self._store, candidates, all_files, newest))
        facts = [
            KeptFacts(
                step,
                manifest.created,
                manifest.metrics,
                tags.of(step, manifest.digest),
                manifest.healthy,
                manifest.timeline,
            )
            for step, manifest in candidates.items()
            if step not in reasons
        ]
        for step, why in needs.readers.items():
            steps = candidates if step is None else [step] if step in candidates else []
            reasons |= dict.fromkeys(steps, (f"read by {why}",))
        for step, whys in kept(self._keep, facts, newest).items():
            reasons[step] = (*whys, *reasons.get(step, ()))
        return reasons

    def await_readers(self) -> None:
        """Watch the leases of processes on other hosts for one lease time, to find out which are dead."""
        seconds = self._readers.seconds_to_watch()
        if seconds:
            logger.info("%s: watching who reads for %g s", self._store.url, seconds)
            self._clock.sleep(seconds)

    def warn_once(self, text: str, *values: object) -> None:
        """Log a warning, unless it was logged before: a collection runs at every commit."""
        if text % values not in self._warned:
            self._warned.add(text % values)
            logger.warning(text, *values)


@dataclass(frozen=True, slots=True)
class _Found:
    """What one look at the run found."""

    listed: Sequence[StepFiles]
    moved: MovedManifests
    chosen: Chosen
    under_way: frozenset[int]
    wanted_packs: frozenset[str]
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
        return found.beyond(others.outside(begun))

    def _without(self, reasons: Collection[int], moved: MovedManifests) -> Unreferenced:
        return unreferenced(
            [_with_attempts_of(moved, files) for files in self.listed],
            {*reasons, *self.under_way},
            self.under_way,
            removal.is_pack_key,
            self.wanted_packs | packs_named_by(moved.manifests),
            packs_known=self.packs_known,
        )


def _ended(inventory: Inventory, removed: Unreferenced) -> list[str]:
    """Return the keys of the records of timelines that nobody needs, given what was removed since the inventory."""
    going = inventory.unreferenced
    unclean = steps_of(key for key in going.files if key not in removed.files)
    return ended_records(
        [record for record in inventory.records if unclean.isdisjoint(step for step, _ in record.discarded)],
        inventory.timelines,
        removed.manifests,
        going.manifests,
    )


def _is_at(manifests: Mapping[int, Manifest | None], name: StepName) -> bool:
    """Return whether the folder of a step has this manifest, or one that cannot be read."""
    manifest = manifests.get(name[0])
    return name[0] in manifests and (manifest is None or manifest.digest == name[1])


def _with_attempts_of(moved: MovedManifests, files: StepFiles) -> StepFiles:
    """Return the files of a step, with the attempts pinned that moved manifests name."""
    named = moved.attempts(files.step, files.attempts)
    return replace(files, pinned=files.pinned | named) if named else files


def _require_all_listed(store: Store, first: Inventory, second: Inventory, under_way: frozenset[int]) -> None:
    """Refuse a second listing that lacks steps of the first: nobody but this process removes steps."""
    lost = sorted(first.standing.keys() - second.standing.keys() - under_way)
    if lost:
        raise CorruptError(
            f"{store.url}: steps [{first_three(lost)}] were there and are not listed any more; nothing was removed. "
            "Something else removes steps here, or the listing is stale. Find out which, then try again"
        )


def _report(survey: Inventory, to_delete: Unreferenced) -> CollectReport:
    steps = tuple(sorted(to_delete.steps.keys() & survey.standing.keys()))
    superseded = sorted({name for name in to_delete.moved.values() if to_delete.steps.get(name[0]) != name[1]})
    return CollectReport(
        survey.reasons,
        steps,
        len(to_delete.files),
        sum(to_delete.files.values()),
        tuple(f"{step}@{digest[:8]}" for step, digest in superseded),
        survey.protected,
    )


def _counted(moved: MovedManifests, fence: Fence) -> list[Manifest]:
    """Return the manifests under `superseded/` that count."""
    return [
        manifest
        for manifest in moved.manifests
        if manifest.step is not None and fence.admits(manifest.step, manifest.epoch, manifest.digest)
    ]


def _whole_tags(store: Store) -> Tags:
    """Return the tags; one that cannot be read may name a step that must stay."""
    tags = read_tags(store)
    for error in tags.damaged.values():
        raise error
    return tags


def planned(store: Store, clock: Clock, keep: KeepPolicy | None, choice: ChosenNames = NOTHING_CHOSEN) -> CollectReport:
    """Return what a collection would remove; changes nothing.

    Raises:
        MissingError: The root holds no run.
        CheckpointError: As `CheckpointGC.survey`.
    """
    survey = CheckpointGC(store, clock, keep, None, choice=choice).survey()
    return _report(survey, survey.unreferenced)


def collected(
    store: Store, clock: Clock, keep: KeepPolicy | None, grace_seconds: float, lease_seconds: float
) -> CollectReport:
    """Collect once, in a process that does not train.

    Raises:
        MissingError: The root holds no run.
        CheckpointError: As `CheckpointGC.collect`; a job that writes there is `ConflictError`.
    """
    with hold_writer_lease(store, clock, lease_seconds, require_run(store)) as writer_lease:

        def wait(seconds: float) -> bool:
            clock.sleep(seconds)
            return False

        collector = CheckpointGC(store, clock, keep, writer_lease)
        collector.await_readers()
        report = collector.collect(grace_seconds, wait)
        assert report is not None, "nobody gives it up"
        return report


def require_run(store: Store) -> str:
    """Return the id of the run at a root.

    Raises:
        MissingError: There is no run.
        InvalidError: The path is one checkpoint.
    """
    require_no_checkpoint(store)
    run_id = read_run_id(store)
    if run_id is None:
        raise MissingError(f"{store.url}: no root of a run; expected a folder that holds {RUN_FILE}. Look elsewhere")
    return run_id
