"""Removing steps of a run that a person named, in a process that does not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.base.clock import Clock
from holdfast.base.ports.store import Store
from holdfast.base.types.removal import StepAndDigest
from holdfast.core.format.step_name import StepName, step_name
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, UnavailableError, first_three
from holdfast.stored.leases.writer import hold_writer_lease
from holdfast.stored.repository.catalog import exists, manifest_digest
from holdfast.stored.repository.epochs import forget_steps
from holdfast.stored.repository.near_tier import NEAR_FILE, renew_tags
from holdfast.stored.repository.quarantine import list_records, release
from holdfast.stored.repository.removal import mark_key, marks, put_request, remove_marks
from holdfast.stored.repository.tags import Tags, read_tags, remove_tag_of_step
from holdfast.stored.repository.timeline_records import TimelineRecord, put_record
from holdfast.stored.repository.timelines import RunTimelines, StoredManifest, run_timelines
from holdfast.stored.repository.two_roots import TwoRoots, places_of
from holdfast.training.loading.named_step import find_named
from holdfast.training.runs.removal.chosen_steps import ChosenNames
from holdfast.training.runs.removal.garbage_collection import CheckpointGC, CollectReport, planned, require_run


@dataclass(frozen=True, slots=True)
class RemovedSteps:
    """What a removal of named steps removed, or would remove."""

    steps: tuple[str, ...]
    """Steps that were removed: their numbers, or number and digest of superseded ones."""

    left: Mapping[str, tuple[str, ...]]
    """Steps that stay for now, each with the reasons, such as a reader."""

    files: int
    """Number of files that were removed, without manifests."""

    bytes: int
    """Their bytes."""

    gone: tuple[str, ...] = ()
    """Steps that an earlier removal, which did not end, had removed already."""


@dataclass(frozen=True, slots=True)
class StepRemoval:
    """A request to remove steps of a run."""

    steps: Sequence[int | str]
    """Their numbers or tags, or `latest`; for a superseded step number and digest, as `300@1f2e`."""

    tagged: bool
    """Whether steps with tags go too, and their tags with them."""

    all_steps: bool
    """Whether the last step that a resume could take may go."""

    def planned(self, store: Store, clock: Clock) -> RemovedSteps:
        """Return what would be removed; changes nothing. Errors as `execute`."""
        require_run(store)
        chosen = self._chosen(store)
        return chosen.report(_joined([planned(place, clock, None, chosen.choice) for place in places_of(store)]))

    def execute(self, store: Store, clock: Clock, grace_seconds: float, lease_seconds: float) -> RemovedSteps:
        """Remove the steps, with marks and grace as garbage collection does.

        What is named is noted on storage until all of it is gone. So the same request again ends one that did not end,
        although some of its steps are gone.

        Raises:
            MissingError: There is no such step; nothing was removed.
            ConflictError: A job writes to the run, or a step has a tag; nothing was removed.
            InvalidError: No step that a resume could take would stay; nothing was removed.
            CorruptError: A manifest cannot be read, so nobody can say what its step needs.
        """
        run_id = require_run(store)
        with hold_writer_lease(store, clock, lease_seconds, run_id) as writer_lease:
            if isinstance(store, TwoRoots):
                renew_tags(store)
            # Only now: nobody else moves or removes a step from here on.
            chosen = self._chosen(store)
            request = ""
            # On a full disk the steps go all the same, but the same request again would not know them.
            with suppress(UnavailableError):
                request = put_request(store, run_id, _nonce(clock), writer_lease.epoch, chosen.names)
            chosen.keep_newest_timeline(store, writer_lease.epoch)
            choice, reports = replace(chosen.choice, request=request), list[CollectReport]()
            # Each place by itself: a pack that a link holds in one of them may be needed in the other.
            for place in places_of(store):
                collector = CheckpointGC(place, clock, None, writer_lease, choice=choice)
                collector.await_readers()
                report = collector.collect(grace_seconds, _sleeping(clock))
                assert report is not None, "nobody stops it"
                reports.append(report)
            removed = chosen.report(_joined(reports))
            chosen.remove_what_names(store, clock, removed.steps, writer_lease.epoch)
            if request and not removed.left:
                remove_marks(store, [request])
            return removed

    def _chosen(self, store: Store) -> _Chosen:
        stored, tags = run_timelines(store), read_tags(store)
        for error in tags.damaged.values():
            raise error
        manifests, gone = dict[str, StoredManifest](), dict[str, frozenset[StepAndDigest]]()
        for named in self.steps:
            asked = _named_by(named)
            try:
                _, manifest = find_named(store, asked, stored)
            except MissingError:
                gone[str(named)] = _removed_before(store, asked, stored, tags)
                if not gone[str(named)]:
                    raise
            else:
                manifests[_name(manifest, stored)] = _readable(store, manifest)
        chosen = _Chosen(manifests, gone, stored, tags)
        tagged = {name: chosen.tags_of([name]) for name in (*manifests, *gone)}
        if not self.tagged and any(tagged.values()):
            named_tags = first_three(f"{name} ({', '.join(found)})" for name, found in tagged.items() if found)
            raise ConflictError(
                f"{store.url}: steps have tags: {named_tags}. Nothing was removed. Remove a tag first (holdfast tag "
                "ROOT --remove NAME), or remove the steps with their tags (--tagged, tagged=True)"
            )
        if not self.all_steps and not chosen.leaves_a_step(store):
            raise InvalidError(
                f"{store.url}: no step that a resume could take would stay; expected one at least. Nothing was "
                "removed. Leave one out, or remove them all (--all, all_steps=True)"
            )
        return chosen


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The named steps, found in the run."""

    manifests: Mapping[str, StoredManifest]
    """By name."""

    gone: Mapping[str, frozenset[StepAndDigest]]
    """Steps that a removal that did not end has removed, by name."""

    stored: RunTimelines
    tags: Tags

    @property
    def choice(self) -> ChosenNames:
        """What the collector removes. Tags that come later keep a step."""
        overruled = {(tag, _name_of(each)) for name, each in self.manifests.items() for tag in self.tags_of([name])}
        begun = frozenset(step for names in self.gone.values() for step, _ in names)
        return ChosenNames(self.names, frozenset(overruled), is_all=True, begun=begun)

    @property
    def names(self) -> frozenset[StepAndDigest]:
        """Step and digest of each, also of those that are gone."""
        return frozenset(map(_name_of, self.manifests.values())).union(*self.gone.values())

    def tags_of(self, names: Sequence[str]) -> list[str]:
        """Return the tags of some of the steps."""
        return [tag for name in names for each in self._names_of(name) for tag in self.tags.of(*each)]

    def _names_of(self, name: str) -> frozenset[StepAndDigest]:
        manifest = self.manifests.get(name)
        return self.gone[name] if manifest is None else frozenset({_name_of(manifest)})

    def leaves_a_step(self, store: Store) -> bool:
        """Return whether a resume could take another step, or could take none before."""
        records, going = list_records(store), {manifest.key for manifest in self.manifests.values()}
        left = [
            manifest
            for manifest in self.stored.chain
            if manifest.key not in going
            and manifest.timeline is not None
            and (manifest.step, str(manifest.digest)[:16]) not in records
        ]
        return bool(left) or all(manifest.key not in going for manifest in self.stored.chain)

    def keep_newest_timeline(self, store: Store, epoch: int) -> None:
        """Record the newest timeline if no step of it stays: steps that it superseded must not come back."""
        newest, going = self.stored.newest, self.names
        # The near tier may be lost: what the root has must say so.
        stored = run_timelines(store.root) if isinstance(store, TwoRoots) else self.stored
        stay = (*stored.chain, *stored.superseded)
        is_stated = any(
            manifest.timeline is not None and manifest.timeline.id == newest.id and _name_of(manifest) not in going
            for manifest in stay
        )
        if newest.number > 1 and not is_stated and newest.id not in self.stored.recorded:
            put_record(store, TimelineRecord(newest, epoch))

    def remove_what_names(self, store: Store, clock: Clock, names: Sequence[str], epoch: int) -> None:
        """Remove the tags and quarantine records of steps that are gone. A tag may name another step by now.

        Args:
            store: The root of the run.
            clock: Randomness.
            names: The steps that were removed.
            epoch: The epoch of the caller, of which the list names them no more.
        """
        tags = read_tags(store)
        gone = frozenset(each for name in (*names, *self.gone) for each in self._names_of(name))
        if isinstance(store, TwoRoots) or exists(store, NEAR_FILE):
            forget_steps(store, epoch, gone)
        for step, digest in gone:
            for tag in tags.of(step, digest):
                remove_tag_of_step(store, tags.whole[tag], mark_key(_nonce(clock)))
            others = {identity for number, identity in list_records(store) if number == step} - {digest[:16]}
            release(store, step, kept=others)

    def report(self, report: CollectReport) -> RemovedSteps:
        """Return what was removed, from the report of the collector."""
        left = {}
        for name, manifest in self.manifests.items():
            is_gone = (
                manifest.step in report.steps or f"{manifest.step}@{str(manifest.digest)[:8]}" in report.superseded
            )
            if not is_gone or _name_of(manifest) in report.protected:
                left[name] = report.protected.get(_name_of(manifest), ("it changed meanwhile",))
        steps = tuple(name for name in self.manifests if name not in left)
        return RemovedSteps(steps, left, report.files, report.bytes, tuple(self.gone))


def _joined(reports: Sequence[CollectReport]) -> CollectReport:
    """Return one report of the removals in all places of a run."""
    return CollectReport(
        {step: whys for report in reports for step, whys in report.reasons.items()},
        tuple(sorted({step for report in reports for step in report.steps})),
        sum(report.files for report in reports),
        sum(report.bytes for report in reports),
        tuple(sorted({name for report in reports for name in report.superseded})),
        {name: whys for report in reports for name, whys in report.protected.items()},
    )


def _name(manifest: StoredManifest, stored: RunTimelines) -> str:
    """Return the name by which a step is loaded."""
    newest = stored.at(manifest.step)
    is_in_chain = newest is not None and newest.key == manifest.key
    return str(manifest.step) if is_in_chain else f"{manifest.step}@{str(manifest.digest)[:8]}"


def _removed_before(store: Store, named: StepName, stored: RunTimelines, tags: Tags) -> frozenset[StepAndDigest]:
    """Return what a removal that did not end has removed under a name; empty if none has.

    Args:
        store: The root of the run.
        named: The name, which no stored step has.
        stored: What is stored.
        tags: The tags.
    """
    tag = None if named.tag is None else tags.whole.get(named.tag)
    step, digest = (named.step, named.digest) if tag is None else (tag.step, tag.digest)
    there = {(manifest.step, manifest.digest) for manifest in (*stored.chain, *stored.superseded)}
    return frozenset(
        each
        for mark in marks(store)
        for each in mark.steps
        if each[0] == step and each[1].startswith(digest) and each not in there
    )


def _named_by(step: object) -> StepName:
    # None names the newest step elsewhere. Nobody removes a step without a name.
    return step_name("" if step is None else step)


def _name_of(manifest: StoredManifest) -> StepAndDigest:
    return manifest.step, str(manifest.digest)


def _readable(store: Store, manifest: StoredManifest) -> StoredManifest:
    if manifest.timeline is None:
        raise CorruptError(
            f"{store.url}/{manifest.key}: the manifest of step {manifest.step} cannot be read, so what else needs its "
            f"files is unknown; expected a whole one. Nothing was removed. Run: holdfast repair {store.url}"
        )
    # A run without epochs has one timeline, and its manifests were not read.
    return replace(manifest, digest=manifest.digest or manifest_digest(store, manifest.step, manifest.key))


def _nonce(clock: Clock) -> str:
    return clock.random_bytes(16).hex()


def _sleeping(clock: Clock) -> Callable[[float], bool]:
    def wait(seconds: float) -> bool:
        clock.sleep(seconds)
        return False

    return wait
