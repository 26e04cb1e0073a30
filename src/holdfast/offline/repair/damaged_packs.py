"""Damaged and missing packs of which the run has another name or copy: each becomes a link to a proven one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.names import is_coded_pack_name
from holdfast.errors import UnavailableError
from holdfast.offline.links.shared_packs import (
    Names,
    manifests_of,
    names_of,
    packs_with_links,
    proven,
    remove_unfinished,
    replace_by_link,
    shared_packs,
)
from holdfast.offline.repair.overlay import OverlayStore
from holdfast.stored.repository.catalog import exists
from holdfast.stored.repository.quarantine import backup_key
from holdfast.stored.repository.removal import link_keys

logger = logging.getLogger(__name__)

_DIGITS_BYTES = 8


def plan_packs(store: Store, overlay: OverlayStore, manifest: Manifest, codecs: Codecs) -> list[str]:
    """Plan to replace the damaged packs of a step, and damaged copies of them in other steps; return what will be done.

    Only packs with several copies are read, and those that the step lacks. A link is no copy: it is damaged with the
    pack. It outlives a removal of the pack.

    Args:
        store: The root of the run.
        overlay: Receives the plan, and then reads the packs as they will be.
        manifest: Manifest of the step.
        codecs: What decodes coded chunks.
    Raises:
        CorruptError: The index of the step is damaged.
    """
    done = []
    # Coded packs last: their chunks may be coded against those of a plain pack, which is then whole.
    found = packs_with_links(manifest, shared_packs(manifests_of(store)))
    for record, links in sorted(found, key=lambda each: is_coded_pack_name(each[0].name)):
        names = names_of(store, record, links)
        lacking = _lacking(manifest, record.name, names)
        if len(names.whole) + bool(names.other) + bool(lacking) < 2:
            continue
        whole = proven(overlay, record, names.whole, manifest, codecs)
        damaged = [*names.other, *(key for keys in names.whole if keys not in whole for key in keys)]
        if whole:
            overlay.relinked |= dict.fromkeys([*damaged, *lacking], whole[0][0])
            done += [f"{key}: replaced by a link to {whole[0][0]}, proven by its digest" for key in damaged]
            done += [f"{key}: was missing, linked to {whole[0][0]}, proven by its digest" for key in lacking]
    return done


def _lacking(manifest: Manifest, pack: str, names: Names) -> list[str]:
    """Return the key that a step should read a pack by, if it has the pack under no key that it reads."""
    links = link_keys(manifest)
    keys = [pack, links[pack]] if pack in links else [pack]
    existing = {*names.other, *(key for group in names.whole for key in group)}
    return [] if existing.intersection(keys) else keys[-1:]


def replace_packs(
    store: Store, clock: Clock, step: int, relinked: Mapping[str, str], hold: Callable[[], object]
) -> None:
    """Keep each damaged pack under `quarantine/`, then make its key, or that of a missing one, a link to a whole one.

    Args:
        store: The root of the run.
        clock: Gives random names.
        step: The step that is repaired.
        relinked: Keys of damaged and missing packs, each with the key of a whole one.
        hold: Raises if another process writes to the run.
    Raises:
        UnavailableError: The file system refuses hard links.
    """
    for key, source in relinked.items():
        hold()
        kept = backup_key(step, clock.random_bytes(_DIGITS_BYTES).hex(), key)
        is_missing = not exists(store, key)
        state = "missing" if is_missing else "damaged"
        if not (is_missing or store.link(key, kept)) or not replace_by_link(store, clock, source, key):
            raise UnavailableError(
                f"{store.url}/{key}: is {state}, and this file system refuses a link to {source}, which is whole. Copy "
                "the run to a file system with hard links, or replace the file by that one"
            )
        if not is_missing:
            logger.info("%s is kept as %s", key, kept)
    remove_unfinished(store)
