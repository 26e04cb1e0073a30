"""The packs of a run that several steps share, and every key under which each of them may be stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.base.clock import Clock
from holdfast.base.ports.codec import Codecs
from holdfast.base.ports.packs import Stored
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import FileRecord, Manifest
from holdfast.core.format.names import step_folder, step_of_pack
from holdfast.errors import CheckpointError, MissingError
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.copying.pack_proof import PackPieces, is_proven
from holdfast.stored.repository.catalog import manifest_in, read_index, read_manifest_bytes
from holdfast.stored.repository.publish import pack_paths
from holdfast.stored.repository.removal import link_keys
from holdfast.stored.repository.timelines import run_timelines

RELINKING = "relinking/"
"""Folder under the root for names that are about to replace others. Nothing in it is needed afterwards."""

_NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class SharedPack:
    """A pack that one step wrote and others refer to."""

    record: FileRecord
    """Its size and digest; its name is its path from the root."""

    links: tuple[str, ...]
    """Keys of the links to it: those that exist, and those that could be made."""

    referring: Manifest
    """A manifest that names it."""


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one pack that exist, by the object that they name."""

    whole: tuple[tuple[str, ...], ...]
    """Keys of each object of the right size. The first has the key of the pack itself, or else the most keys."""

    other: tuple[str, ...]
    """Keys of objects of another size."""


def manifests_of(store: Store) -> Iterator[Manifest]:
    """Yield the manifests of a run that count and can be read."""
    timelines = run_timelines(store)
    for stored in (*timelines.chain, *timelines.superseded):
        folder = step_folder(stored.step)
        try:
            yield manifest_in(folder, read_manifest_bytes(store, folder, stored.key), f"{store.url}/{stored.key}")
        except CheckpointError:
            continue


def shared_packs(manifests: Iterable[Manifest]) -> list[SharedPack]:
    """Return the packs that steps other than their own refer to, by path."""
    found: dict[str, SharedPack] = {}
    for manifest in manifests:
        links = link_keys(manifest)
        for pack in manifest.packs:
            if step_of_pack(pack.name) is not None:
                before = found[pack.name].links if pack.name in found else ()
                found[pack.name] = SharedPack(pack, (*before, links[pack.name]), manifest)
    return [found[path] for path in sorted(found)]


def packs_with_links(manifest: Manifest, shared: Sequence[SharedPack]) -> list[tuple[FileRecord, tuple[str, ...]]]:
    """Return the packs of a manifest that others share too: each under its path, and with the keys of its links."""
    links = {pack.record.name: pack.links for pack in shared}
    paths = pack_paths(manifest)
    return [
        (pack._replace(name=paths[pack.name]), links[paths[pack.name]])
        for pack in manifest.packs
        if paths.get(pack.name) in links
    ]


def names_of(store: Store, record: FileRecord, links: Sequence[str]) -> Names:
    """Return which keys of a pack exist, and which of them name one object."""
    objects: dict[str, list[str]] = {}
    other = []
    for key in (record.name, *links):
        try:
            if store.size(key) != record.bytes:
                other.append(key)
            else:
                objects.setdefault(store.identity(key), []).append(key)
        except MissingError:
            continue
    groups = sorted(objects.values(), key=lambda keys: (record.name not in keys, -len(keys)))
    return Names(tuple(map(tuple, groups)), tuple(other))


def chunk_bytes_of(store: Store, manifest: Manifest) -> int:
    """Return the bytes of a chunk in a checkpoint: the same as in every pack that it refers to.

    Raises:
        CorruptError: Its index is damaged.
    """
    assert manifest.step is not None, "a run holds steps"
    return read_index(store, step_folder(manifest.step), manifest).chunk_bytes


def proven(
    store: Store,
    record: FileRecord,
    groups: Sequence[tuple[str, ...]],
    referring: Manifest,
    codecs: Codecs,
) -> list[tuple[str, ...]]:
    """Return the groups of keys whose object is the pack that was saved, as its digest proves.

    Args:
        store: The root of the run.
        record: The record of the pack, under its path from the root.
        groups: The keys of each object.
        referring: A manifest that names the pack.
        codecs: What decodes coded chunks.
    Raises:
        CorruptError: The index of the manifest is damaged.
    """
    assert referring.step is not None, "a run holds steps"
    chunk_bytes = chunk_bytes_of(store, referring)
    location = CheckpointLocation(store, step_folder(referring.step), referring.step, root=store)
    listing = PackPieces(referring, location.packs_of(referring), codecs)
    return [keys for keys in groups if is_proven(Stored(store, keys[0]), record, chunk_bytes, listing)]


def replace_by_link(store: Store, clock: Clock, source: str, key: str) -> bool:
    """Make a key name the object of another key; return False if the store refuses the link. A crash loses nothing.

    The old object of the key stays whole under its other keys: a new name takes the place of one, in one call.
    """
    name = f"{RELINKING}{clock.random_bytes(_NAME_BYTES).hex()}"
    if not store.link(source, name):
        return False
    store.move(name, key)
    return True


def has_unfinished(store: Store) -> bool:
    """Return whether a killed process left names, or the folder of such names."""
    return RELINKING.rstrip("/") in store.folders("")


def remove_unfinished(store: Store) -> None:
    """Remove the names that a killed process left, and their folder. Only the holder of the writer lease calls."""
    # Deleting an absent key makes the store remove its empty folder.
    store.delete([*(entry.key for entry in store.list(RELINKING)), f"{RELINKING}nothing"])
