"""Finishing what a killed writer left: a manifest that it had moved from its key, and neither removed nor put back."""

from __future__ import annotations

import logging

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import is_aside, superseded_key
from holdfast.core.format.sealed_json import stated_digest
from holdfast.errors import ConflictError, CorruptError, InvalidError, MissingError
from holdfast.stored.repository.epochs import is_valid_manifest
from holdfast.stored.repository.manifest_removal import return_to_folder
from holdfast.stored.repository.quarantine import is_set_aside
from holdfast.stored.repository.timelines import superseded_keys
from holdfast.stored.repository.two_roots import TwoRoots

logger = logging.getLogger(__name__)


def finish_removals(store: Store, fence: Fence) -> None:
    """Finish each removal of a manifest that was interrupted. A new writer calls it before it lists the steps.

    A manifest under quarantine that a save sets aside has a copy under `quarantine/`, and goes. Damaged and moved, it
    would keep every pack of the run: nobody could say which of them it names. Each other one goes back to its step,
    unless it does not count. A collection decides about it again; and if it was taken by mistake, it must not be lost.

    Args:
        store: The root of the run; with a near tier `TwoRoots`.
        fence: Which manifests count.
    Raises:
        UnavailableError: Storage failed.
    """
    if isinstance(store, TwoRoots):
        # Each by itself: a manifest goes back where its packs are.
        finish_removals(store.near, fence)
        finish_removals(store.root, fence)
        return
    for step, key in superseded_keys(store):
        if not is_aside(key):
            continue
        try:
            data = store.get(key, MANIFEST_BYTES_MAX)
        except (CorruptError, InvalidError, MissingError):
            continue  # No manifest, or not a readable file: nobody can say what it is.
        if key == superseded_key(step, stated_digest(data) or ""):
            continue  # Its name is that of its digest, which has the check digits by chance.
        if not is_set_aside(store, step, data) and is_valid_manifest(data, fence, f"{store.url}/{key}"):
            try:
                return_to_folder(store, step, data)
            except (ConflictError, InvalidError) as error:
                # It stays where it is, and counts there by its content.
                logger.warning("step %d: %s", step, error)
                continue
        store.delete([key])
