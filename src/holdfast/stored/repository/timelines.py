"""The manifests of a run by timeline: the chain that a resume goes back along, and the superseded ones.

A manifest is stored in the folder of its step. One whose step was saved again on a newer timeline is under
`superseded/`. Where it is stored does not matter: only the timelines that the manifests state decide what a resume
may take. So a save that moves a manifest away and then fails changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.timeline import FIRST_TIMELINE, Fork, Timeline, parents_in
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest, run_fields_of_manifest
from holdfast.core.format.names import (
    SUPERSEDED_FOLDER,
    is_aside,
    manifest_key,
    manifest_keys,
    superseded_in,
    superseded_key,
)
from holdfast.core.format.sealed_json import possible_digests
from holdfast.core.format.timeline import timeline_in_damaged
from holdfast.errors import CheckpointError, ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.repository.catalog import manifest_digest, step_folders
from holdfast.stored.repository.epochs import current_fence, unreadable_error
from holdfast.stored.repository.manifest_removal import name_moved, remove_manifest
from holdfast.stored.repository.publish import publish
from holdfast.stored.repository.quarantine import stated_timelines
from holdfast.stored.repository.timeline_records import timeline_records

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest of a run that counts."""

    step: int
    """Its step."""

    key: str
    """Where it is stored."""

    digest: str | None = None
    """Its digest; None if it was not read or is damaged."""

    timeline: Timeline | None = FIRST_TIMELINE
    """Its timeline; None if it is damaged or of a newer format."""

    stated: Timeline | None = None
    """The timeline that it still states if it is damaged; nothing proves it."""

    log: str = ""
    """Id of the redo log of which it is a base; empty if there is none, or if it was not read."""


@dataclass(frozen=True, slots=True)
class RunTimelines:
    """The manifests of a run that count."""

    newest: Timeline
    """The newest timeline."""

    chain: tuple[StoredManifest, ...]
    """Manifests that a resume may take, the newest last: by timeline, then by step. A damaged one is among them, so
    that readers report it."""

    superseded: tuple[StoredManifest, ...]
    """All other manifests, by ascending step."""

    recorded: frozenset[str] = frozenset()
    """Ids of the timelines that records state; a manifest may state them too."""

    stated: frozenset[str] = frozenset()
    """Ids of the timelines that anything states: a manifest, a record, or what is damaged or under quarantine."""

    parents: Mapping[str, Fork] = field(default_factory=dict)
    """Where timelines leave their parents, by id."""

    def fork(self, origin: Timeline, number: int, new_id: str, step: int, digest: str) -> Timeline:
        """Return a timeline that leaves another one at a step of it, without ancestors that have no step any more.

        Args:
            origin: The other timeline, as a manifest states it.
            number, new_id, step, digest: As `Timeline.fork`.
        """
        timeline = origin.completed(self.parents).fork(number, new_id, step, digest)
        if any(manifest.timeline is None for manifest in (*self.chain, *self.superseded)):
            return timeline  # A damaged manifest may be of any of them.
        parent, *older = timeline.ancestors
        return replace(timeline, ancestors=(parent, *(fork for fork in older if fork.timeline in self.stated)))

    @property
    def known(self) -> frozenset[Timeline]:
        """The timelines that the manifests state."""
        stated = (manifest.timeline for manifest in (*self.chain, *self.superseded))
        return frozenset(timeline for timeline in stated if timeline is not None)

    def at(self, step: int) -> StoredManifest | None:
        """Return the manifest of a step in the chain; the newest if it has the number twice."""
        return next((manifest for manifest in reversed(self.chain) if manifest.step == step), None)

    def log_end(self, base: StoredManifest) -> int | None:
        """Return the step below which the log of a base counts; None: to the end of the log.

        The log ends where a newer manifest of the chain is a base of another log or of none, and where the newest
        timeline has left that of the base. A manifest that cannot be read ends no log.
        """
        assert base.timeline is not None, "the base was read"
        newer = [(each.step, each.log) for each in self.newer_than(base) if each.timeline is not None]
        return log_end(base.log, base.timeline, newer, self.newest)

    def superseded_at(self, step: int) -> list[StoredManifest]:
        """Return the superseded manifests of a step."""
        return [manifest for manifest in self.superseded if manifest.step == step]

    def newer_than(self, manifest: StoredManifest) -> tuple[StoredManifest, ...]:
        """Return the manifests that a resume tries before this one; all of the chain if it is superseded."""
        return self.chain[self.chain.index(manifest) + 1 :] if manifest in self.chain else self.chain


def log_end(log: str, timeline: Timeline, newer: Iterable[tuple[int, str]], newest: Timeline) -> int | None:
    """Return the step below which the log of a base counts; None: to the end of the log. Pure; as `RunTimelines`.

    Args:
        log, timeline: Of the base.
        newer: Step and log of each newer manifest of the chain.
        newest: The newest timeline.
    """
    ends = [step for step, other in newer if other != log]
    ends += [fork.step + 1 for fork in newest.ancestors if fork.timeline == timeline.id]
    return min(ends, default=None)


def run_timelines(store: Store) -> RunTimelines:
    """Return the manifests of a run, by timeline.

    A step whose manifest is a link or a pipe is skipped with a warning: no save publishes these, and one such step
    must not make the others unusable.
    """
    return timelines_under(store, current_fence(store))


def timelines_from(store: Store, step: int) -> RunTimelines:
    """Return the manifests of a run by timeline, as `run_timelines`; those below a step only if they may matter.

    In a run with one timeline they do not: which steps are newer follows from the numbers. A run has many steps, and a
    manifest of a large job has megabytes.
    """
    fence = current_fence(store)
    if not fence.has_timelines:
        folders = step_folders(store)
        manifests = list(_stored_manifests(store, fence, [each for each in folders if each >= step]))
        # The list of the epoch, which would say that there are several, may have been lost.
        if all({manifest.timeline, manifest.stated} <= {None, FIRST_TIMELINE} for manifest in manifests):
            return arranged(manifests)
    return timelines_under(store, fence)


def timelines_under(store: Store, fence: Fence) -> RunTimelines:
    """Return the manifests of a run by timeline, as `run_timelines`, given which manifests count."""
    # Before the manifests: a record goes once a manifest states as new a timeline, so one of the two is seen.
    recorded = [record.timeline for record in timeline_records(store, fence)]
    manifests = list(_stored_manifests(store, fence, step_folders(store)))
    elsewhere = (*recorded, *stated_timelines(store)) if fence.has_timelines else ()
    return replace(arranged(manifests, elsewhere, fence.parents), recorded=frozenset(each.id for each in recorded))


def newest_timeline(
    store: Store, fence: Fence, in_folders: Mapping[int, Manifest | None], moved: MovedManifests
) -> Timeline:
    """Return the newest timeline, as `run_timelines` does, from manifests that were read already.

    A damaged one is read again: its text may state the newest timeline, though no manifest that can be read does.

    Args:
        store: The root of the run.
        fence: Which manifests count.
        in_folders: The manifest that counts in the folder of each step; None if it cannot be read.
        moved: Those under `superseded/`.
    """
    if not fence.has_timelines:
        return FIRST_TIMELINE
    whole = [(step, manifest) for step, manifest in in_folders.items() if manifest is not None]
    for manifest in moved.manifests:
        if manifest.step is not None and fence.admits(manifest.step, manifest.epoch, manifest.digest):
            whole.append((manifest.step, manifest))
    damaged = [(step, manifest_key(step)) for step, manifest in in_folders.items() if manifest is None]
    damaged += [(manifest.step, manifest.key) for manifest in moved.damaged]
    known = [StoredManifest(step, manifest_key(step), each.digest, each.timeline) for step, each in whole]
    read = (_read(store, fence, step, key) for step, key in damaged)
    elsewhere = (*(record.timeline for record in timeline_records(store, fence)), *stated_timelines(store))
    manifests = (*known, *(manifest for manifest in read if manifest is not None))
    return arranged(manifests, elsewhere, fence.parents).newest


def committed_steps(store: Store) -> list[int]:
    """Return the steps that a resume may take, ascending: without those that a newer timeline superseded."""
    return sorted(manifest.step for manifest in run_timelines(store).chain)


def arranged(
    manifests: Iterable[StoredManifest],
    elsewhere: Iterable[Timeline] = (),
    parents: Mapping[str, Fork] | None = None,
) -> RunTimelines:
    """Return manifests by timeline. Pure.

    Args:
        manifests: The manifests that count.
        elsewhere: Timelines that records and manifests under `quarantine/` state.
        parents: Where timelines leave their parents, by id, as the list of the epoch states it.
    """
    ordered = sorted(manifests, key=lambda manifest: (manifest.step, manifest.key))
    proven = {manifest.timeline for manifest in ordered if manifest.timeline is not None}
    # The only manifest of the newest timeline may be damaged or under quarantine. Without it, a resume would take the
    # steps that training went back past. A text that is damaged just there contradicts the others, and does not count.
    stated = {*elsewhere, *(manifest.stated for manifest in ordered if manifest.stated is not None)}
    timelines = proven | {one for one in stated if not any(one.contradicts(other) for other in proven)}
    # Versions before stated all ancestors of a timeline in each of its manifests.
    in_order = sorted(timelines, key=lambda timeline: (timeline.number, timeline.id, len(timeline.ancestors)))
    # What a manifest proves overrides what a damaged text states.
    parents = parents_in(sorted(in_order, key=proven.__contains__)) | dict(parents or {})
    newest = in_order[-1].completed(parents) if in_order else FIRST_TIMELINE
    ages = {id_: age for age, id_ in enumerate((newest.id, *(fork.timeline for fork in newest.ancestors)))}
    in_folders = {manifest.step for manifest in ordered if superseded_in(manifest.key) is None}
    chain: list[StoredManifest] = []
    superseded: list[StoredManifest] = []
    for manifest in ordered:
        timeline = manifest.timeline
        if timeline is None:
            # Unknown: a resume tries it and reports the damage. One that was moved is left out if another manifest
            # took its place. If none did, the save that moved it failed, and no newer timeline may have taken effect.
            is_in_chain = superseded_in(manifest.key) is None or manifest.step not in in_folders
        else:
            age = ages.get(timeline.id)
            is_in_chain = age == 0 or (age is not None and manifest.step <= newest.ancestors[age - 1].step)
        (chain if is_in_chain else superseded).append(manifest)
    # Training may have saved a lower number on a newer timeline: the newer timeline comes first all the same.
    chain.sort(key=lambda manifest: (-_age_in(newest, ages, manifest), manifest.step))
    stated_ids = frozenset(timeline.id for timeline in timelines)
    return RunTimelines(newest, tuple(chain), tuple(superseded), stated=stated_ids, parents=parents)


def _age_in(newest: Timeline, ages: Mapping[str, int], manifest: StoredManifest) -> int:
    """Return how many timelines of the chain are newer than that of a manifest in it."""
    if manifest.timeline is None:
        return next(
            (age for age, fork in enumerate(newest.ancestors) if manifest.step > fork.step), len(newest.ancestors)
        )
    return ages[manifest.timeline.id]


def displace(store: Store, step: int, digest: str, epoch: int) -> None:
    """Move the manifest of a step to `superseded/`, so that a newer timeline can save the step.

    The copy is durable before the manifest goes. After a crash in between, both exist and are the same manifest. A
    manifest that a newer writer has published here meanwhile stays: see `withdraw`.

    Args:
        store: The root of the run.
        step: The step.
        digest: Digest of the manifest.
        epoch: Epoch of the caller. Its list is one with timelines: readers and the next writer look for the copy.
    Raises:
        ConflictError: Another process took over; the manifest stays.
    """
    key = manifest_key(step)
    data = store.get(key, MANIFEST_BYTES_MAX)
    publish(store, superseded_key(step, digest), data)
    remove_manifest(store, step, key, data, epoch)


@dataclass(frozen=True, slots=True)
class DamagedManifest:
    """A manifest under `superseded/` that cannot be read."""

    step: int
    """The step, which its name tells."""

    key: str
    """Its key."""

    error: CheckpointError
    """The damage."""


@dataclass(frozen=True, slots=True)
class MovedManifests:
    """The manifests under `superseded/`. They and their files stay."""

    manifests: tuple[Manifest, ...] = ()
    """Those that can be read."""

    damaged: tuple[DamagedManifest, ...] = ()
    """Those that cannot be read: they may name any attempt of their step, and any pack."""

    @property
    def unreadable(self) -> frozenset[int]:
        """Steps of those that cannot be read."""
        return frozenset(manifest.step for manifest in self.damaged)

    def attempts(self, step: int, folders: Iterable[str]) -> set[str]:
        """Return the attempts of a step that they name or may name.

        Args:
            step: The step.
            folders: All attempts of the step.
        """
        named = {manifest.attempt for manifest in self.manifests if manifest.step == step}
        return named | set(folders) if step in self.unreadable else named


def moved_manifests(store: Store, of_step: int | None = None) -> MovedManifests:
    """Return the manifests that made room for newer timelines, of all steps or of one."""
    manifests, damaged = [], []
    for step, key in superseded_keys(store):
        if of_step not in (None, step):
            continue
        try:
            manifests.append(decode_manifest(store.get(key, MANIFEST_BYTES_MAX), f"{store.url}/{key}"))
        except MissingError:
            continue  # A writer was just removing it.
        except (CorruptError, InvalidError) as error:
            damaged.append(DamagedManifest(step, key, error))
    return MovedManifests(tuple(manifests), tuple(damaged))


def _stored_manifests(store: Store, fence: Fence, steps: Iterable[int]) -> Iterator[StoredManifest]:
    places = [(step, manifest_key(step)) for step in steps]
    if not fence.epoch and not fence.has_timelines:
        # A run without epochs has one timeline, and every manifest counts: none needs to be read.
        yield from (StoredManifest(step, key) for step, key in places if _is_readable(store, step, key))
        return
    known: set[tuple[int, str]] = set()
    for step, key in _folders_then_moved(store, places, fence):
        manifest = _read(store, fence, step, key)
        # After a crash a manifest is in both places: the one in the step's folder comes first.
        if manifest is not None and (manifest.digest is None or (step, manifest.digest) not in known):
            yield manifest
            known.add((step, manifest.digest or ""))


def _folders_then_moved(store: Store, places: Iterable[tuple[int, str]], fence: Fence) -> Iterator[tuple[int, str]]:
    """Return step and key of the manifests in step folders, and then of those under `superseded/`."""
    yield from places
    # Listed only after the manifests in the folders were read. A writer copies a manifest to `superseded/` before it
    # removes it from its folder: in this order a manifest that moves meanwhile is seen at least once.
    if fence.has_timelines:
        yield from superseded_keys(store)


def superseded_keys(store: Store) -> list[tuple[int, str]]:
    """Return step and key of every manifest under `superseded/`."""
    keys = [entry.key for entry in store.list(SUPERSEDED_FOLDER)]
    named = ((superseded_in(key), key) for key in keys)
    return [(name[0], key) for name, key in named if name is not None]


def moved_steps(store: Store, fence: Fence) -> list[tuple[int, str]]:
    """Return step and digest of the manifests under `superseded/` that count.

    A damaged one counts too, by the digest that it had before the damage: a manifest that is repaired or restored is
    then accepted. It is left out if neither its text nor the list of the epoch before tells the digest.

    Raises:
        InvalidError: A manifest is not a readable file, so whether it counts is unknown.
        UnavailableError: Storage failed.
    """
    counted = []
    for step, key in superseded_keys(store):
        data = b""
        try:
            data = store.get(key, MANIFEST_BYTES_MAX)
        except MissingError:
            continue
        except CorruptError:
            pass  # Too large for a manifest.
        except InvalidError as error:
            raise unreadable_error(step, error) from error
        digest: str | None
        try:
            _, epoch, digest, _, _ = run_fields_of_manifest(data, f"{store.url}/{key}")
        except (CorruptError, InvalidError) as error:
            digest = _digest_before_damage(step, key, data, fence)
            if digest is None:
                logger.warning("step %d: its damaged manifest is not accepted, its digest is lost: %s", step, error)
                continue
        else:
            if not fence.admits(step, epoch, digest):
                continue
            if key != superseded_key(step, digest):
                _name_by_digest(store, step, data)
        counted.append((step, digest))
    return counted


def _name_by_digest(store: Store, step: int, data: bytes) -> None:
    """Store a manifest by its digest too: its former writer ended while it put the manifest back."""
    try:
        name_moved(store, step, data)
    except (ConflictError, InvalidError) as error:  # It counts by its content; only a look by digest misses it.
        logger.warning("step %d: %s", step, error)


def _digest_before_damage(step: int, key: str, data: bytes, fence: Fence) -> str | None:
    """Return the digest of a damaged manifest under `superseded/`. Its name has the first 16 digits of it."""
    named = superseded_in(key)
    assert named is not None, "the key was listed as that of a superseded manifest"
    listed = [digest for other, digest in fence.superseded if other == step]
    candidates = (*listed, fence.accepted.get(step), *possible_digests(data))
    return next((digest for digest in candidates if digest is not None and digest.startswith(named[1])), None)


def moved_at(store: Store, step: int) -> list[StoredManifest]:
    """Return the manifests of a step under `superseded/` that count."""
    keys = [key for other, key in superseded_keys(store) if other == step]
    # Most saves find no such key, and need not read the list of the epoch.
    fence = current_fence(store) if keys else Fence()
    manifests = (_read(store, fence, step, key) for key in keys)
    return [manifest for manifest in manifests if manifest is not None]


def holds_manifest(store: Store, step: int, digest: str, key: str | None = None) -> bool:
    """Return whether a manifest of a step is in its folder or under `superseded/`. It may move meanwhile.

    Args:
        store: The root of the run.
        step: The step.
        digest: Digest of the manifest.
        key: Where it was last; None for the folder.
    """
    # In this order: a manifest is copied to `superseded/` before it leaves its folder, and put back before the name
    # that it had meanwhile is deleted.
    keys = dict.fromkeys([*([] if key is None else [key]), *manifest_keys(step, digest)])
    if any(manifest_digest(store, step, each) == digest for each in keys):
        return True
    # A writer may be removing it, or may have been killed at that, and may have taken it by mistake.
    return any(manifest.digest == digest for manifest in moved_at(store, step))


def _is_readable(store: Store, step: int, key: str) -> bool:
    try:
        store.size(key)
    except MissingError:
        return False
    except InvalidError as error:
        logger.warning("step %d is skipped: %s", step, error)
        return False
    return True


def _read(store: Store, fence: Fence, step: int, key: str) -> StoredManifest | None:
    """Return a manifest if it counts."""
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except MissingError:
        # A new writer may have put it back into its folder since that was read.
        return _read(store, fence, step, manifest_key(step)) if is_aside(key) else None
    except CorruptError:  # Too large for a manifest.
        return StoredManifest(step, key, None, None)
    except InvalidError as error:
        logger.warning("step %d is skipped: %s", step, error)
        return None
    return counted(fence, step, key, data, f"{store.url}/{key}")


def counted(fence: Fence, step: int, key: str, data: bytes, where: str) -> StoredManifest | None:
    """Return a manifest if it counts, given its bytes.

    Args:
        fence: Which manifests count.
        step: Its step.
        key: Where it is stored.
        data: Its bytes.
        where: The same place, for messages.
    """
    try:
        fields = run_fields_of_manifest(data, where)
    except (CorruptError, InvalidError):
        return StoredManifest(step, key, None, None, timeline_in_damaged(data))
    if fields.step is not None and not fence.admits(fields.step, fields.epoch, fields.digest):
        return None
    return StoredManifest(step, key, fields.digest, fields.timeline, log=fields.log)
