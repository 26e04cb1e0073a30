"""The manifests of a run by timeline: the chain that a resume goes back along, and the superseded ones.

A manifest is stored in the folder of its step. One whose step was saved again on a newer timeline is under
`superseded/`. Where it is stored does not matter: only the timelines that the manifests state decide what a resume
may take. So a save that moves a manifest away and then fails changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.format.manifest import MANIFEST_BYTES_MAX, decode_manifest, run_fields_of_manifest
from holdfast.format.names import SUPERSEDED_FOLDER, manifest_key, superseded_in, superseded_key
from holdfast.ports.store import Store
from holdfast.repository.catalog import step_folders
from holdfast.repository.epochs import current_fence, require_newest, unreadable_error
from holdfast.repository.publish import publish
from holdfast.types.epoch import Fence
from holdfast.types.manifest import Manifest
from holdfast.types.timeline import FIRST_TIMELINE, Timeline

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

    def at(self, step: int) -> StoredManifest | None:
        """Return the manifest of a step in the chain."""
        return next((manifest for manifest in self.chain if manifest.step == step), None)

    def superseded_at(self, step: int) -> list[StoredManifest]:
        """Return the superseded manifests of a step."""
        return [manifest for manifest in self.superseded if manifest.step == step]

    def newer_than(self, manifest: StoredManifest) -> tuple[StoredManifest, ...]:
        """Return the manifests that a resume tries before this one; all of the chain if it is superseded."""
        return self.chain[self.chain.index(manifest) + 1 :] if manifest in self.chain else self.chain


def run_timelines(store: Store) -> RunTimelines:
    """Return the manifests of a run, by timeline.

    A step whose manifest is a link or a pipe is skipped with a warning: no save publishes these, and one such step
    must not make the others unusable.
    """
    return arranged(_stored_manifests(store, current_fence(store)))


def committed_steps(store: Store) -> list[int]:
    """Return the steps that a resume may take, ascending: without those that a newer timeline superseded."""
    return sorted(manifest.step for manifest in run_timelines(store).chain)


def arranged(manifests: Iterable[StoredManifest]) -> RunTimelines:
    """Return manifests by timeline. Pure."""
    ordered = sorted(manifests, key=lambda manifest: (manifest.step, manifest.key))
    timelines = [manifest.timeline for manifest in ordered if manifest.timeline is not None]
    newest = max(timelines, key=lambda timeline: (timeline.number, timeline.id), default=FIRST_TIMELINE)
    chain: list[StoredManifest] = []
    superseded: list[StoredManifest] = []
    for manifest in ordered:
        timeline = manifest.timeline
        if timeline is None:
            # Unknown: a resume tries it and reports the damage. One that was moved is left out.
            is_in_chain = superseded_in(manifest.key) is None
        else:
            is_in_chain = newest.holds(timeline.id, manifest.step)
        (chain if is_in_chain else superseded).append(manifest)
    # Training may have saved a lower number on a newer timeline: the newer timeline comes first all the same.
    chain.sort(key=lambda manifest: (-_age_in(newest, manifest), manifest.step))
    return RunTimelines(newest, tuple(chain), tuple(superseded))


def _age_in(newest: Timeline, manifest: StoredManifest) -> int:
    """Return how many timelines of the chain are newer than that of a manifest in it."""
    if manifest.timeline is None:
        return next(
            (age for age, fork in enumerate(newest.ancestors) if manifest.step > fork.step), len(newest.ancestors)
        )
    ids = [newest.id, *(fork.timeline for fork in newest.ancestors)]
    return ids.index(manifest.timeline.id)


def displace(store: Store, step: int, digest: str, epoch: int) -> None:
    """Move the manifest of a step to `superseded/`, so that a newer timeline can save the step.

    The copy is durable before the manifest goes. After a crash in between, both exist and are the same manifest.
    """
    key = manifest_key(step)
    publish(store, superseded_key(step, digest), store.get(key, MANIFEST_BYTES_MAX))

    Args:
        store: The root of the run.
        step: The step.
        digest: Digest of the manifest.
        epoch: Epoch of the caller. Its list is one with timelines: readers and the next writer look for the copy.
    Raises:
        ConflictError: Another process took over; the manifest stays.
    store.delete([key])


    # Directly before the deletion: a writer that was stopped for longer than its lease may find here the manifest that
    # a newer writer has published at this step. If this process is stopped between the check and the deletion, the
    # deletion may still remove such a manifest, because a store deletes by key alone. No reader or writer can restore
    # it then: nothing else names its attempt. If the newer writer has not saved the step, the deletion does no harm:
    # its list has the manifest, and the copy counts.
    require_newest(store, epoch)
@dataclass(frozen=True, slots=True)
class MovedManifests:
    """The manifests under `superseded/`. They and their files stay."""

    manifests: tuple[Manifest, ...] = ()
    """Those that can be read."""

    unreadable: frozenset[int] = frozenset()
    """Steps of those that cannot be read: they may name any attempt of their step, and any pack."""

    def attempts(self, step: int, folders: Iterable[str]) -> set[str]:
        """Return the attempts of a step that they name or may name.

        Args:
            step: The step.
            folders: All attempts of the step.
        """
        named = {manifest.attempt for manifest in self.manifests if manifest.step == step}
        return named | set(folders) if step in self.unreadable else named


def moved_manifests(store: Store) -> MovedManifests:
    """Return the manifests that made room for newer timelines."""
    manifests, unreadable = [], set()
    for step, key in superseded_keys(store):
        try:
            manifests.append(decode_manifest(store.get(key, MANIFEST_BYTES_MAX), f"{store.url}/{key}"))
        except (CorruptError, InvalidError):
            unreadable.add(step)
    return MovedManifests(tuple(manifests), frozenset(unreadable))


def _stored_manifests(store: Store, fence: Fence) -> Iterator[StoredManifest]:
    places = [(step, manifest_key(step)) for step in step_folders(store)]
    if not fence.epoch and not fence.has_timelines:
        # A run without epochs has one timeline, and every manifest counts: none needs to be read.
        yield from (StoredManifest(step, key) for step, key in places if _is_stored(store, step, key))
        return
    known: set[tuple[int, str]] = set()
    for step, key in _folders_then_moved(store, places, fence):
        manifest = _read(store, fence, step, key)
        # After a crash a manifest is in both places: the one in the step's folder comes first.
        if manifest is not None and (manifest.digest is None or (step, manifest.digest) not in known):
            yield manifest
            known.add((step, manifest.digest or ""))


def superseded_keys(store: Store) -> list[tuple[int, str]]:
    """Return step and key of every manifest under `superseded/`."""
    keys = [entry.key for entry in store.list(SUPERSEDED_FOLDER)]
    named = ((superseded_in(key), key) for key in keys)
    return [(name[0], key) for name, key in named if name is not None]


def moved_steps(store: Store, fence: Fence) -> list[tuple[int, str]]:
    """Return step and digest of the readable manifests under `superseded/` that count."""
    manifests = (_read(store, fence, step, key) for step, key in superseded_keys(store))
    return [
        (manifest.step, manifest.digest)
        for manifest in manifests
        if manifest is not None and manifest.digest is not None
    ]


def _folders_then_moved(store: Store, places: Iterable[tuple[int, str]], fence: Fence) -> Iterator[tuple[int, str]]:
    """Return step and key of the manifests in step folders, and then of those under `superseded/`."""
    yield from places
    # Listed only after the manifests in the folders were read. A writer copies a manifest to `superseded/` before it
    # removes it from its folder: in this order a manifest that moves meanwhile is seen at least once.
    if fence.has_timelines:
        yield from superseded_keys(store)


def _is_stored(store: Store, step: int, key: str) -> bool:
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
        return None
    except CorruptError:  # Too large for a manifest.
        return StoredManifest(step, key, None, None)
    except InvalidError as error:
        logger.warning("step %d is skipped: %s", step, error)
        return None
    try:
        fields = run_fields_of_manifest(data, f"{store.url}/{key}")
    except (CorruptError, InvalidError):
        return StoredManifest(step, key, None, None)
    if fields.step is not None and not fence.admits(fields.step, fields.epoch, fields.digest):
        return None
    return StoredManifest(step, key, fields.digest, fields.timeline)
