"""Removing steps of a run that a person named, in a process that does not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.clock import Clock
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError, first_three
from holdfast.format.step_name import StepName, step_name
from holdfast.leases.writer import hold_writer_lease
from holdfast.loading.named_step import find_named
from holdfast.ports.store import Store
from holdfast.repository.catalog import manifest_digest
from holdfast.repository.quarantine import list_records, release
from holdfast.repository.tags import Tags, read_tags, remove_tag
from holdfast.repository.timeline_records import TimelineRecord, put_record
from holdfast.repository.timelines import RunTimelines, StoredManifest, run_timelines
from holdfast.runs.collection.chosen_steps import ChosenNames, StepAndDigest
from holdfast.runs.collection.garbage_collection import CheckpointGC, CollectReport, planned, require_run


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
        return chosen.report(planned(store, clock, None, chosen.choice))

    def execute(self, store: Store, clock: Clock, grace_seconds: float, lease_seconds: float) -> RemovedSteps:
        """Remove the steps, with marks and grace as garbage collection does.

        Raises:
            MissingError: There is no such step; nothing was removed.
            ConflictError: A job writes to the run, or a step has a tag; nothing was removed.
            InvalidError: No step that a resume could take would stay; nothing was removed.
            CorruptError: A manifest cannot be read, so nobody can say what its step needs.
        """
        with hold_writer_lease(store, clock, lease_seconds, require_run(store)) as writer_lease:
            # Only now: nobody else moves or removes a step from here on.
            chosen = self._chosen(store)
            chosen.keep_newest_timeline(store, writer_lease.epoch)
            collector = CheckpointGC(store, clock, None, writer_lease, choice=chosen.choice)
            collector.await_readers()
            report = collector.collect(grace_seconds, _sleeping(clock))
            assert report is not None, "nobody stops it"
            removed = chosen.report(report)
            chosen.remove_what_names(store, removed.steps)
            return removed

    def _chosen(self, store: Store) -> _Chosen:
        stored, tags = run_timelines(store), read_tags(store)
        for error in tags.damaged.values():
            raise error
        manifests: dict[str, StoredManifest] = {}
        for named in self.steps:
            _, manifest = find_named(store, _named_by(named), stored)
            manifests[_name(manifest, stored)] = _readable(store, manifest)
        chosen = _Chosen(manifests, stored, tags)
        tagged = {name: chosen.tags_of([name]) for name in manifests}
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

    stored: RunTimelines
    tags: Tags

    @property
    def choice(self) -> ChosenNames:
        """What the collector removes. Tags that come later keep a step."""
        overruled = {(tag, _name_of(each)) for name, each in self.manifests.items() for tag in self.tags_of([name])}
        return ChosenNames(self.names, frozenset(overruled), is_all=True)

    @property
    def names(self) -> frozenset[StepAndDigest]:
        """Step and digest of each."""
        return frozenset(map(_name_of, self.manifests.values()))

    def tags_of(self, names: Sequence[str] | Mapping[str, object]) -> list[str]:
        """Return the tags of some of the steps."""
        return [tag for name in names for tag in self.tags.of(*_name_of(self.manifests[name]))]

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
        stay = (*self.stored.chain, *self.stored.superseded)
        is_stated = any(manifest.timeline == newest and _name_of(manifest) not in going for manifest in stay)
        if newest.number > 1 and not is_stated and newest not in self.stored.recorded:
            put_record(store, TimelineRecord(newest, epoch))

    def remove_what_names(self, store: Store, names: Sequence[str]) -> None:
        """Remove the tags and quarantine records of steps that are gone. A tag may name another step by now."""
        tags = read_tags(store)
        for name in names:
            step, digest = _name_of(self.manifests[name])
            for tag in tags.of(step, digest):
                with suppress(MissingError):
                    remove_tag(store, tag)
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
        return RemovedSteps(steps, left, report.files, report.bytes)


def _name(manifest: StoredManifest, stored: RunTimelines) -> str:
    """Return the name by which a step is loaded."""
    newest = stored.at(manifest.step)
    is_in_chain = newest is not None and newest.key == manifest.key
    return str(manifest.step) if is_in_chain else f"{manifest.step}@{str(manifest.digest)[:8]}"


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


def _sleeping(clock: Clock) -> Callable[[float], bool]:
    def wait(seconds: float) -> bool:
        clock.sleep(seconds)
        return False

    return wait
