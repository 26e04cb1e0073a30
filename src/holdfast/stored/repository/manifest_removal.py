"""Taking a manifest from its key. A manifest that another writer has put there meanwhile is put back."""

from __future__ import annotations

import logging
from contextlib import suppress

from holdfast.base.clock import SystemClock
from holdfast.base.ports.store import Store
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import aside_key, manifest_key, superseded_key
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import ConflictError, MissingError
from holdfast.stored.repository.epochs import require_newest
from holdfast.stored.repository.publish import publish

logger = logging.getLogger(__name__)

_ASIDE_BYTES = 5


def remove_manifest(store: Store, step: int, key: str, data: bytes, epoch: int, *, is_only_copy: bool = False) -> None:
    """Remove a manifest of a step from its key.

    The states of the key, and who moves between them:
    - `data` is there. This call moves it to a key of its own under `superseded/`, and removes it there.
    - Another manifest is there: this process was stopped after its look at the epoch, for longer than its lease, and a
      newer writer has published it. This call moves it too, sees what it moved, and puts it back. From the move on it
      is also under `superseded/`, where it counts as it did before: a crash at any point loses nothing, and a reader,
      which lists `superseded/` after it has read the folders, sees it. So this call never removes it from there.
    - Nothing is there: another writer has removed it.

    If this process ends in between, the next writer finishes: see `interrupted_removal.py`.

    Args:
        store: The root of the run.
        step: The step.
        key: Key of the manifest.
        data: Its bytes.
        epoch: Epoch of the caller.
        is_only_copy: Whether it counts and no copy is durable elsewhere. Then it stays if another process took over:
            its writer may have gone on from it.
    Raises:
        ConflictError: Another process took over. What it has published stays.
    """
    require_newest(store, epoch)
    # A deletion by key alone would remove whatever is there by now. The random name is used by this call alone.
    aside = aside_key(step, SystemClock().random_bytes(_ASIDE_BYTES))
    try:
        store.move(key, aside)
    except MissingError:
        require_newest(store, epoch)
        return
    try:
        moved = store.get(aside, MANIFEST_BYTES_MAX)
    except MissingError:
        # The next writer has put back what this call moved: see `interrupted_removal.py`.
        require_newest(store, epoch)
        raise
    if moved == data:
        if is_only_copy:
            _require_still_newest(store, step, aside, data, epoch)
        store.delete([aside])
        return
    _put_back(store, step, key, moved)
    require_newest(store, epoch)
    raise ConflictError(
        f"{store.url}/{key}: another manifest was stored while this process replaced the one it had read; expected the "
        "same. It was put back. Stop one of the two jobs, or save elsewhere"
    )


def _require_still_newest(store: Store, step: int, aside: str, data: bytes, epoch: int) -> None:
    try:
        require_newest(store, epoch)
    except ConflictError:
        with suppress(MissingError):
            # If it is gone, the newer writer has put it back, and may have removed it since.
            store.size(aside)
            return_to_folder(store, step, data)
            store.delete([aside])
        raise


def _put_back(store: Store, step: int, key: str, data: bytes) -> None:
    """Store a manifest of another writer under its key again, and under the name that a moved manifest has."""
    logger.warning("step %d: another writer took over meanwhile; the manifest is put back", step)
    name_moved(store, step, data)
    try:
        publish(store, key, data)
    except ConflictError:
        # The step was saved once more, on a newer timeline: this manifest would have been moved away for that.
        logger.warning("step %d was saved once more; the manifest stays under superseded/", step)


def return_to_folder(store: Store, step: int, data: bytes) -> None:
    """Store a manifest that was being removed in the folder of its step again.

    It does not stay under `superseded/`: no collection takes it from there.

    Raises:
        ConflictError, InvalidError: The step was saved again, and what is under `superseded/` by the digest is damaged.
    """
    try:
        publish(store, manifest_key(step), data)
    except ConflictError:
        # The step was saved again since: on a newer timeline, for which the manifest would have been moved as well.
        name_moved(store, step, data)
    else:
        logger.warning("step %d: a writer ended while it removed the manifest; it is put back", step)


def name_moved(store: Store, step: int, data: bytes) -> None:
    """Store a manifest under `superseded/` by its digest, as `step@digest` and tags look for it. It stays there."""
    digest = stated_digest(data)
    if digest is not None:
        publish(store, superseded_key(step, digest), data)
