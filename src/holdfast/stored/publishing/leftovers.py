"""Deletes the files of failed attempts from the folder of a published checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.names import is_attempt_file, is_attempt_folder, step_folder
from holdfast.errors import CheckpointError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.repository.catalog import manifest_in, read_manifest, read_manifest_bytes
from holdfast.stored.repository.epochs import require_newest
from holdfast.stored.repository.overwriting import is_claimed
from holdfast.stored.repository.publish import packs_named_by
from holdfast.stored.repository.quarantine import quarantined_attempts
from holdfast.stored.repository.timelines import moved_manifests, run_timelines

logger = logging.getLogger(__name__)


def _counted_manifests(store: Store) -> Iterator[Manifest]:
    """Return the manifests of a run that count; raises `CheckpointError` if a manifest cannot be read."""
    timelines = run_timelines(store)
    for stored in (*timelines.chain, *timelines.superseded):
        folder = step_folder(stored.step)
        yield manifest_in(folder, read_manifest_bytes(store, folder, stored.key), f"{store.url}/{stored.key}")


def delete_leftovers(
    location: CheckpointLocation,
    attempt: str,
    name: str,
    epoch: int,
    under_way: Collection[str] = (),
    *,
    claim: str | None = None,
) -> None:
    """Remove the files of failed attempts. The published manifest keeps these attempts from publishing.

    A manifest that was removed since may have published one of these attempts. Other steps may refer to packs of that
    attempt: such packs stay. If a manifest cannot be read, everything stays. If a newer timeline meanwhile saves the
    step again, the remaining files stay: that save may own them.

    Args:
        location: The checkpoint.
        attempt: Id of the published attempt.
        name: Name of the save, for messages.
        epoch: Epoch of the writer lease; 0 for a checkpoint saved by path.
        under_way: Attempts of this process that have not ended.
        claim: Nonce of the claim of a save that may overwrite.
    """
    store = location.store
    try:
        folders = store.folders(location.folder)
        others = [folder for folder in folders if is_attempt_folder(folder) and folder != attempt]
        kept, referenced = set(under_way), frozenset[str]()
        if others and location.step is not None:
            kept |= quarantined_attempts(store, location.step)
            kept |= moved_manifests(store, location.step).attempts(location.step, others)
        others = [folder for folder in others if folder not in kept]
        # Most often a newer timeline saves the step again, and nothing is left to remove: then no other step is read.
        if others and location.step is not None:
            counted = packs_named_by(_counted_manifests(store))
            # Read after the manifests in the folders: a manifest that moves meanwhile is then in one of the two lists.
            referenced = counted | packs_named_by(moved_manifests(store).manifests)
        for folder in others:
            prefix = f"{location.folder}{folder}/"
            keys = [entry.key for entry in store.list(prefix)]
            if all(is_attempt_file(key.removeprefix(prefix)) for key in keys):
                # Check after the listing: then no listed file belongs to a writer that took over, or to a newer save of
                # the step, which writes only after this manifest has moved away.
                if epoch:
                    require_newest(store, epoch)
                if _is_overwritten(location, claim) or not _is_published(location, attempt):
                    logger.info("%s: it is saved again; files of failed attempts stay for that save", name)
                    return
                # Deleting the absent key `nothing` makes the store remove the folder, even an empty one.
                store.delete([*(key for key in keys if key not in referenced), f"{prefix}nothing"])
            else:
                logger.warning(
                    "%s: %s holds files that no save writes, so it stays. Remove them by hand if they are not needed",
                    name,
                    prefix,
                )
    except CheckpointError as error:
        logger.warning(
            "%s: files of failed attempts stay for now, the next save of the step removes them: %s", name, error
        )


def _is_overwritten(location: CheckpointLocation, claim: str | None) -> bool:
    """Return whether another job overwrites the checkpoint, so that its attempt must stay.

    Check before the manifest is read: a job whose claim is gone by then has left a manifest there, if it published.
    """
    return location.step is None and is_claimed(location.store, besides=claim)


def _is_published(location: CheckpointLocation, attempt: str) -> bool:
    """Return whether the manifest in the folder names this attempt."""
    try:
        return read_manifest(location.store, location.folder).attempt == attempt
    except MissingError:
        return False
