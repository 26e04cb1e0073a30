"""Damaged packs of which the run has another copy: each becomes a link to a copy that its digest proves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from holdfast.clock import Clock
from holdfast.errors import UnavailableError
from holdfast.offline.links.shared_packs import (
    chunk_bytes_of,
    manifests_of,
    names_of,
    packs_with_links,
    proven,
    remove_unfinished,
    replace_by_link,
    shared_packs,
)
from holdfast.offline.repair.overlay import OverlayStore
from holdfast.ports.store import Store
from holdfast.repository.quarantine import backup_key
from holdfast.types.manifest import Manifest

logger = logging.getLogger(__name__)

_DIGITS_BYTES = 8


def plan_packs(store: Store, overlay: OverlayStore, manifest: Manifest) -> list[str]:
    """Plan to replace the damaged packs of a step, and damaged copies of them in other steps; return what will be done.

    Only packs with several copies are read. A link is no copy: it is damaged with the pack.

    Args:
        store: The root of the run.
        overlay: Receives the plan, and then reads the packs as they will be.
        manifest: Manifest of the step.
    Raises:
        CorruptError: The index of the step is damaged.
    """
    done = []
    for record, links in packs_with_links(manifest, shared_packs(manifests_of(store))):
        names = names_of(store, record, links)
        if len(names.whole) + bool(names.other) < 2:
            continue
        whole = proven(store, record, names.whole, chunk_bytes_of(overlay, manifest))
        damaged = [*names.other, *(key for keys in names.whole if keys not in whole for key in keys)]
        if whole and damaged:
            overlay.relinked |= dict.fromkeys(damaged, whole[0][0])
            done += [f"{key}: replaced by a link to {whole[0][0]}, proven by its digest" for key in damaged]
    return done


def replace_packs(
    store: Store, clock: Clock, step: int, relinked: Mapping[str, str], hold: Callable[[], object]
) -> None:
    """Keep each damaged pack under `quarantine/`, then make its key a link to a whole one.

    Args:
        store: The root of the run.
        clock: Gives random names.
        step: The step that is repaired.
        relinked: Keys of damaged packs, each with the key of a whole one.
        hold: Raises if another process writes to the run.
    Raises:
        UnavailableError: The file system refuses hard links.
    """
    for key, source in relinked.items():
        hold()
        kept = backup_key(step, clock.random_bytes(_DIGITS_BYTES).hex(), key)
        if not store.link(key, kept) or not replace_by_link(store, clock, source, key):
            raise UnavailableError(
                f"{store.url}/{key}: is damaged, and this file system refuses a link to {source}, which is whole. Copy "
                "the run to a file system with hard links, or replace the file by that one"
            )
        logger.info("%s is kept as %s", key, kept)
    remove_unfinished(store)
