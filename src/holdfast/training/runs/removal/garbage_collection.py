"""Garbage collection: removes the steps and files that no retention policy, tag, reader or save needs.

One collection, in order; any error ends it, and the next commit begins again:

    survey     Take an inventory. Nothing unreferenced: done.
    marked     A mark on storage lists what is to go. Readers and tags that come now see it.
    grace      Wait, so that readers that came before the mark store their leases.
    carried    The mark says that removal begins: from here a reader of a listed step fails.
    confirmed  Take a second inventory. Only what both inventories list is removed.
    removed    Steps first, then files. The mark is deleted, also after an error.

Several marks may be in their grace at once, in `Background`: each step waits for its own grace and no other.

Only the holder of the writer lease collects. Where a manifest is stored decides nothing: the policy decides about those
under `superseded/` as about those in the folders of steps. Steps that were chosen go, whatever the policy says: see
`chosen_steps.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepAndDigest, StepFiles, Unreferenced
from holdfast.base.types.timeline import Timeline
from holdfast.core.format.names import RUN_FILE
from holdfast.errors import CorruptError, MissingError, UnavailableError, first_three
from holdfast.policies import KeepPolicy
from holdfast.stored.checkpoint.location import require_no_checkpoint
from holdfast.stored.leases.reader import ReaderLeases
from holdfast.stored.leases.writer import WriterLease, hold_writer_lease
from holdfast.stored.repository import removal
from holdfast.stored.repository.catalog import read_run_id, step_folders
from holdfast.stored.repository.epochs import current_fence
from holdfast.stored.repository.quarantine import QuarantineRecord, quarantined, superseded_packs
from holdfast.stored.repository.tags import whole_tags
from holdfast.stored.repository.timeline_records import timeline_records
from holdfast.stored.repository.timelines import MovedManifests, moved_manifests, newest_timeline
from holdfast.training.runs.inventory_cache import InventoryCache, listed_at_once
from holdfast.training.runs.removal.chosen_steps import (
    NOTHING_CHOSEN,
    ChosenNames,
    Needs,
    discarded_in,
    judged,
    left_by_policy,
    name_of,
    undecided,
)
from holdfast.training.runs.removal.incomplete_steps import incomplete_steps
from holdfast.training.runs.removal.inventory import Found, Inventory, ended_in
from holdfast.training.runs.removal.linked_packs import linked_packs
from holdfast.training.runs.removal.log_segments import BASE, kept_bases, unneeded_segments
from holdfast.training.runs.removal.pins import Pins
from holdfast.training.runs.removal.retention import KeptFacts, kept
from holdfast.training.runs.removal.uploads import uploads_removed

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection removed and kept."""

    reasons: Mapping[int, tuple[str, ...]]
    """Steps that stay, each with the reasons; and removed steps whose packs other steps need."""

    steps: tuple[int, ...]
    """Steps that were removed, or would be. Steps without a valid manifest are not listed: no reader saw them."""

    files: int
    """Number of files that were removed, or would be, without manifests."""

    bytes: int
    """Their bytes."""

    superseded: tuple[str, ...] = ()
    """Steps that were removed, or would be, with their manifests under `superseded/`: number and digest, `300@1f2e`."""

    protected: Mapping[StepAndDigest, tuple[str, ...]] = field(default_factory=dict)
    """Chosen steps, by number and digest, that stay for now, each with the reasons."""

    uploads: int = 0
    """Uploads in parts that were never ended, and are gone or would be."""


@dataclass(frozen=True, slots=True)
class Marked:
    """What one mark lists."""

    inventory: Inventory
    """The inventory that found it."""

    to_delete: Unreferenced
    """The steps and files that may go after the grace: none that another mark lists."""

    nonce: str
    """Names the mark on storage; empty if there is nothing to list."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The complete steps among them, ascending."""
        moved = {step for step, _ in self.to_delete.moved.values()}
        return tuple(sorted((self.to_delete.steps.keys() & self.inventory.standing.keys()) | moved))

    @property
    def names(self) -> tuple[str, ...]:
        """Their names for a message: with the digest if the number is saved again, or may be."""
        moved, standing = {*self.to_delete.moved.values()}, self.inventory.standing
        again = moved.union(*(record.discarded for record in self.inventory.records))
        listed = moved | {(step, standing[step]) for step in self.to_delete.steps.keys() & standing.keys()}
        return tuple(
            f"{step}@{digest[:8]}" if (step, digest) in again else str(step) for step, digest in sorted(listed)
        )


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
        self._known = InventoryCache(store)
        self._run_id: str | None = None
        """Id of the run, which never changes; None before it was read."""
        self._warned: set[str] = set()
        self._removed_steps: set[int] = set()
        """Steps removed here since the oldest mark in its grace: its inventory still lists them."""

    @property
    def url(self) -> str:
        """The URL of the root."""
        return self._store.url

    @property
    def may_remove(self) -> bool:
        """Whether this process holds the writer lease."""
        return self._writer_lease is not None and self._writer_lease.epoch > 0

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
        marked = self.mark()
        if not marked.to_delete:
            return _report(marked.inventory, Unreferenced())
        is_stopped = True
        try:
            is_stopped = wait(grace_seconds)
        finally:
            if is_stopped:
                self.remove_marks([marked])
        return None if is_stopped else self.execute([marked])

    def mark(self, others: Sequence[Marked] = ()) -> Marked:
        """Take an inventory, and put a mark that lists what is to go.

        Args:
            others: Marks in their grace; what they list is left out. All other marks on storage are removed.
        Raises:
            CheckpointError: As `collect`.
        """
        removal.remove_folders(self._store, (first := self.survey()).bare)
        # These marks are of ended collections: only the holder of the writer lease runs a collection.
        ours = {self._choice.request, *map(_mark_key, others)}
        ended = [key for key in removal.mark_keys(self._store) if key not in ours]
        removal.remove_marks(self._store, [*ended, *ended_in(first, Unreferenced())])
        if not others:
            self._removed_steps.clear()
        to_delete = first.unreferenced
        for other in others:
            to_delete = to_delete.without(other.to_delete)
        if not to_delete:
            return Marked(first, to_delete, "")
        marked = Marked(first, to_delete, self._clock.random_bytes(_NONCE_BYTES).hex())
        self._put_mark(marked, is_carried_out=False)
        return marked

    def execute(self, marks: Sequence[Marked]) -> CollectReport:
        """Remove what marks list and a second inventory lists too. Their grace has run. The marks are removed.

        Raises:
            CheckpointError: As `collect`.
        """
        assert self._writer_lease is not None, "only the holder of the writer lease removes"
        try:
            for marked in marks:
                self._put_mark(marked, is_carried_out=True)
            second = self.survey()
            under_way = self._pins.under_way()
            for marked in marks:
                _require_all_listed(self._store, marked.inventory, second, under_way | self._removed_steps)
            confirmed = [marked.to_delete.confirmed_by(second.unreferenced) for marked in marks]
            to_delete = confirmed[0].joined(confirmed[1:])
            free = self._pins.release_for_removal(to_delete.numbers)
            try:
                if free != to_delete.numbers:
                    # A save pinned one of them meanwhile: a new inventory finds the files that it needs.
                    second = self.survey()
                    to_delete = to_delete.confirmed_by(second.unreferenced)
                # A step of another mark may stay for now, as after a removal that failed: it must not lose its packs.
                to_delete = to_delete.without_files(second.packs_without(to_delete.manifests))
                self._writer_lease.require(self._store)
                # Before the removal: it may fail half way. Then the steps that are gone are not missing.
                self._removed_steps |= to_delete.steps.keys()
                to_delete = removal.remove(self._store, to_delete, self._writer_lease.epoch)
                self._store.delete(ended_in(second, to_delete))
            finally:
                self._pins.release_for_removal(frozenset())
            return _report(second, to_delete)
        finally:
            # After an error too: without the mark, the steps that stay can be read again.
            self.remove_marks(marks)

    def remove_marks(self, marks: Iterable[Marked]) -> None:
        """Remove marks from storage."""
        removal.remove_marks(self._store, map(_mark_key, marks))

    def _put_mark(self, marked: Marked, *, is_carried_out: bool) -> None:
        assert self._writer_lease is not None, "only the holder of the writer lease removes"
        run_id, nonce, epoch = marked.inventory.run_id, marked.nonce, self._writer_lease.epoch
        put = partial(removal.put_mark, self._store, run_id, nonce, epoch, is_carried_out=is_carried_out)
        try:
            put(marked.to_delete)
        except UnavailableError:
            # A full disk may have no room for two marks at once. The names of the files are for people only, and the
            # announcement has no effect on readers.
            self.remove_marks([marked])
            put(replace(marked.to_delete, files={}))

    def survey(self) -> Inventory:
        """Return the inventory of the run.

        Raises:
            CorruptError: The record of the run or a tag is damaged, so what must stay is unknown.
            InvalidError: The policy ranks by a metric that no step has.
            UnavailableError: Storage failed.
        """
        self._run_id = self._run_id or require_run(self._store)
        fence = current_fence(self._store)
        # Before the steps are listed: a save that ends during the listing then still counts as under way.
        under_way, needed = self._pins.under_way(), self._pins.needed()
        store, traits = listed_at_once(self._store), self._store.traits
        quarantine = quarantined(store)
        all_files, manifests, reasons = self._inspected(store, fence, quarantine)
        # After the folders: a manifest that moves meanwhile is then in one of the two lists.
        moved = moved_manifests(self._store)
        newest = newest_timeline(store, fence, manifests, moved)
        records = timeline_records(store, fence)
        # Leases before tags: a tagger holds a lease on the step until its tag is put. See `training/runs/tags.py`.
        readers, tags = self._readers.holds(forget=self._writer_lease is not None), whole_tags(self._store)
        needs = Needs(tags, readers, quarantine, self._pins)
        counted = _counted(moved, fence)
        whole = [manifest for manifest in (*manifests.values(), *counted) if manifest is not None]
        chosen = judged(self._choice, whole, records, newest, needs)
        standing = {name_of(manifest) for manifest in manifests.values() if manifest is not None}
        # After a crash both copies of a manifest may be there: the one in the folder goes first.
        elsewhere = [manifest for manifest in counted if name_of(manifest) not in standing]
        whys = self._kept(undecided(manifests, elsewhere, reasons, needs, chosen), all_files, newest, needs)
        reasons |= {step: why for (step, digest), why in whys.items() if (step, digest) in standing}
        chosen = replace(chosen, going=chosen.going | left_by_policy(elsewhere, whys.keys(), needs))
        for step in needed & manifests.keys():
            reasons[step] = (*reasons.get(step, ()), "a save under way needs it")
        current = self._pins.current
        if current is not None and _is_at(manifests, current):
            reasons.setdefault(current[0], ("the run goes on from it",))
        unread = sorted({step for step, manifest in manifests.items() if manifest is None} | moved.unreadable)
        self._warn_of_unread(unread)
        listed = self._known.with_files_to_delete(all_files, {*reasons, *under_way}, fence)
        packs = linked_packs(store, listed, {*reasons, *under_way}, needed)
        found = Found(packs.listed, moved, chosen, under_way, superseded_packs(store), traits, packs_known=not unread)
        begun = discarded_in(records) | self._choice.begun if self._choice.is_all else None
        bases = None if unread else [name for name, why in whys.items() if BASE in why]
        segments = unneeded_segments(store, all_files, whole, newest, bases, needs.readers.keys(), self._pins.log)
        to_delete = found.unreferenced(reasons, begun).with_files(segments)
        return Inventory(
            self._run_id,
            {files.step: files.digest for files in listed if files.digest is not None and files.counts},
            reasons,
            to_delete,
            tuple(files.step for files in listed if not files.holds_anything and files.step not in under_way),
            found.packs_of(to_delete),
            chosen.protected,
            records,
            {name_of(manifest): manifest.timeline.number for manifest in whole},
            packs.linked,
            {step: (f"holds packs of steps {first_three(named)}",) for step, named in packs.holders.items()},
        )

    def _inspected(
        self, store: Store, fence: Fence, quarantine: Mapping[int, Mapping[str, QuarantineRecord]]
    ) -> tuple[list[StepFiles], dict[int, Manifest | None], dict[int, tuple[str, ...]]]:
        """Return the files of each step folder, the manifests that count, and why damaged ones stay."""
        all_files: list[StepFiles] = []
        manifests: dict[int, Manifest | None] = {}
        reasons: dict[int, tuple[str, ...]] = {}
        folders = step_folders(store)
        self._known.begin(store, folders)
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
        candidates: Mapping[StepAndDigest, Manifest],
        all_files: Sequence[StepFiles],
        newest: Timeline,
        needs: Needs,
    ) -> Mapping[StepAndDigest, tuple[str, ...]]:
        """Return why further steps stay: the policy or a tag keeps them, or a reader has a lease on them."""
        reasons = dict(incomplete_steps(self._store, candidates, all_files, newest, needs.tags))
        facts = [
            KeptFacts(
                step,
                manifest.created,
                manifest.metrics,
                needs.tags.of(step, digest),
                manifest.healthy,
                manifest.timeline,
                digest,
            )
            for (step, digest), manifest in candidates.items()
            if (step, digest) not in reasons
        ]
        for read, why in needs.readers.items():
            reasons |= {name: (f"read by {why}",) for name in candidates if read in (None, name[0])}
        by_log = kept_bases([candidates[each.name] for each in facts], newest)
        for name, whys in (*kept(self._keep, facts, newest).items(), *by_log.items()):
            reasons[name] = (*whys, *reasons.get(name, ()))
        return {name: whys for name, whys in reasons.items() if whys}

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


def _is_at(manifests: Mapping[int, Manifest | None], name: StepAndDigest) -> bool:
    """Return whether the folder of a step has this manifest, or one that cannot be read."""
    manifest = manifests.get(name[0])
    return name[0] in manifests and (manifest is None or manifest.digest == name[1])


def _mark_key(marked: Marked) -> str:
    return removal.mark_key(marked.nonce)


def _require_all_listed(store: Store, first: Inventory, second: Inventory, gone: Set[int]) -> None:
    """Refuse a second listing that lacks steps of the first: nobody but this process removes steps.

    Args:
        store: The root of the run.
        first, second: The two inventories.
        gone: Steps that may be missing: those under way, and those that this process has removed.
    """
    lost = sorted(first.standing.keys() - second.standing.keys() - gone)
    if lost:
        raise CorruptError(
            f"{store.url}: steps [{first_three(lost)}] were there and are not listed any more; nothing was removed. "
            "Something else removes steps here, or the listing is stale. Find out which, then try again"
        )


def _report(survey: Inventory, to_delete: Unreferenced) -> CollectReport:
    steps = tuple(sorted(to_delete.steps.keys() & survey.standing.keys()))
    superseded = sorted({name for name in to_delete.moved.values() if to_delete.steps.get(name[0]) != name[1]})
    # A link takes no space, and its removal frees none.
    removed_bytes = sum(
        size for key, size in to_delete.files.items() if not removal.is_link_key(key) and key not in survey.linked
    )
    return CollectReport(
        dict(sorted({**survey.holding, **survey.reasons}.items())),
        steps,
        len(to_delete.files),
        removed_bytes,
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


def planned(store: Store, clock: Clock, keep: KeepPolicy | None, choice: ChosenNames = NOTHING_CHOSEN) -> CollectReport:
    """Return what a collection would remove; changes nothing.

    Raises:
        MissingError: The root holds no run.
        CheckpointError: As `CheckpointGC.survey`.
    """
    survey = CheckpointGC(store, clock, keep, None, choice=choice).survey()
    return replace(_report(survey, survey.unreferenced), uploads=uploads_removed(store, dry_run=True))


def collected(
    store: Store, clock: Clock, keep: KeepPolicy | None, grace: float, lease_seconds: float, run: Store | None = None
) -> CollectReport:
    """Collect once in a root, in a process that does not train. The lease is that of `run`: with a near tier of both.

    Raises:
        MissingError: The root holds no run.
        CheckpointError: As `CheckpointGC.collect`; a job that writes there is `ConflictError`.
    """
    with hold_writer_lease(run or store, clock, lease_seconds, require_run(store)) as writer_lease:

        def wait(seconds: float) -> bool:
            clock.sleep(seconds)
            return False

        collector = CheckpointGC(store, clock, keep, writer_lease)
        collector.await_readers()
        report = collector.collect(grace, wait)
        assert report is not None, "nobody gives it up"
        files = report.files + removal.remove_probes(store)
        return replace(report, files=files, uploads=uploads_removed(store))


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
