"""Removing unreferenced files from a run: the files of a step, removal marks, and the removal itself.

A mark has two states:
- announced: put before anything is removed; names every step that may go, and the first of the files;
- carried out: put again, before the collector looks for readers and tags a last time.

A reader or tagger first announces itself, then looks for marks that are carried out. The collector does the opposite:
it marks, then looks for readers and tags. So at least one of the two sees the other.
"""

from __future__ import annotations

import heapq
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from holdfast.base.ports.store import Store
from holdfast.base.types.epoch import Fence
from holdfast.base.types.manifest import Manifest
from holdfast.base.types.removal import StepFiles, Unreferenced
from holdfast.core.format.digest import hex_digest_of
from holdfast.core.format.manifest import MANIFEST_BYTES_MAX
from holdfast.core.format.names import (
    is_attempt_file,
    is_attempt_folder,
    is_file_url,
    is_link_name,
    link_name,
    manifest_key,
    step_folder,
    step_of_pack,
)
from holdfast.core.format.sealed_json import (
    Digest,
    EpochNumber,
    StepNumber,
    decode_sealed,
    header,
    sealed,
    stated_digest,
)
from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.settings import MIB
from holdfast.stored.repository.catalog import manifest_in
from holdfast.stored.repository.epochs import require_newest
from holdfast.stored.repository.latest import leave_latest
from holdfast.stored.repository.manifest_removal import remove_manifest
from holdfast.stored.repository.publish import packs_named_by

logger = logging.getLogger(__name__)

MARKS_FOLDER = "collecting/"
"""Folder of the marks, under the root of a run."""

_REPORTS_FOLDER = "reports"
_PROBE = re.compile(r"reports/probe-[0-9a-f]{24}", re.ASCII)
"""Under the root of a run. A process that is killed at its first write to a store of objects leaves one."""
_MARK = re.compile(r"collecting/[0-9a-f]{32}\.json", re.ASCII)
_MARK_BYTES_MAX = 256 * MIB
_MARK_FILES_MAX = 10_000
"""Files that a mark names. They are for people, and every load and tag reads the mark: 85 steps of 16,384 ranks would
make one that readers refuse."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The announcement of one removal."""

    key: str
    """Key of its record."""

    run_id: str
    """The run."""

    epoch: int
    """Epoch of the collector, which stops when the epoch is over."""

    is_carried_out: bool
    """Whether it is too late for a reader to protect a step."""

    steps: frozenset[tuple[int, str]]
    """Steps that lose a manifest, each with the manifest's digest."""


def inspect_step(
    store: Store, step: int, fence: Fence, pinned: Iterable[str] = ()
) -> tuple[StepFiles, Manifest | None, list[str]]:
    """Return the files of a step, its manifest if readable, and keys that no save creates.

    Unknown files are never removed: another tool or a person may need them.

    Args:
        store: The root of the run.
        step: The step.
        fence: Which manifests count.
        pinned: Attempts under quarantine.
    Raises:
        UnavailableError: Storage failed.
    """
    folder = step_folder(step)
    digest, manifest, counts = _manifest_at(store, step, fence)
    attempts: dict[str, dict[str, int]] = {}
    reports: dict[str, int] = {}
    unknown = []
    manifest_bytes = 0
    for entry in store.list(folder):
        subfolder, _, name = entry.key.removeprefix(folder).partition("/")
        if is_attempt_folder(subfolder) and is_attempt_file(name):
            attempts.setdefault(subfolder, {})[entry.key] = entry.bytes
        elif subfolder == _REPORTS_FOLDER and name:
            reports[entry.key] = entry.bytes
        elif entry.key == manifest_key(step):
            manifest_bytes = entry.bytes
        else:
            unknown.append(entry.key)
    named = packs_named_by([] if manifest is None else [manifest])
    # The texts of the listing: two of each would stay until the step is judged.
    own = frozenset(key for sizes in attempts.values() for key in sizes if key in named)
    files = StepFiles(
        step=step,
        digest=digest,
        attempt=None if manifest is None else manifest.attempt,
        counts=counts,
        attempts=attempts,
        reports=reports,
        packs=own | named,
        pinned=frozenset(pinned),
        manifest_bytes=manifest_bytes,
    )
    return files, manifest, unknown


def _manifest_at(store: Store, step: int, fence: Fence) -> tuple[str | None, Manifest | None, bool]:
    """Return a digest that identifies the manifest of a step, the manifest if readable, and whether it counts."""
    key = manifest_key(step)
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except MissingError:
        return None, None, False
    except (CorruptError, InvalidError):
        # Too large, or not a readable file: it counts, so that nothing of the step is removed.
        return "", None, True
    try:
        manifest = manifest_in(step_folder(step), data, f"{store.url}/{key}")
    except (CorruptError, InvalidError):
        return stated_digest(data) or hex_digest_of(data), None, True
    return manifest.digest, manifest, fence.admits(step, manifest.epoch, manifest.digest)


def is_pack_key(key: str) -> bool:
    """Return whether a key under the root of a run names a pack."""
    return step_of_pack(key) is not None


def named_files(manifest: Manifest) -> dict[str, int]:
    """Return the size, by key under the root, of every file of the run that a step's manifest names."""
    assert manifest.step is not None, "a manifest of a run has a step"
    attempt_folder = f"{step_folder(manifest.step)}{manifest.attempt}/"
    return {
        file.name if step_of_pack(file.name) is not None else attempt_folder + file.name: file.bytes
        for file in manifest.files
        if not is_file_url(file.name)
    }


def link_keys(manifest: Manifest) -> dict[str, str]:
    """Return the key that the link to each pack of another step has if it exists, by the path of the pack."""
    assert manifest.step is not None, "a manifest of a run has a step"
    attempt_folder = f"{step_folder(manifest.step)}{manifest.attempt}/"
    paths = (pack.name for pack in manifest.packs if step_of_pack(pack.name) is not None)
    return {path: attempt_folder + link_name(path) for path in paths}


def is_link_key(key: str) -> bool:
    """Return whether a key under the root of a run names a link to a pack of another step."""
    return is_link_name(key.rpartition("/")[2])


class _MarkDocument(msgspec.Struct):
    run_id: str
    epoch: EpochNumber
    carried_out: bool
    steps: list[tuple[StepNumber, Digest]]


def mark_key(nonce: str) -> str:
    """Return the key of a mark."""
    return f"{MARKS_FOLDER}{nonce}.json"


def put_mark(
    store: Store, run_id: str, nonce: str, epoch: int, to_delete: Unreferenced, *, is_carried_out: bool
) -> Mark:
    """Put a mark, announced or carried out. It names all steps, and the first of the files."""
    mark = Mark(mark_key(nonce), run_id, epoch, is_carried_out, to_delete.manifests)
    _put(store, mark, to_delete.files)
    return mark


def put_request(store: Store, run_id: str, nonce: str, epoch: int, steps: frozenset[tuple[int, str]]) -> str:
    """Put an announced mark of the steps that a person named; return its key.

    It outlives the removal unless all of them are gone. So the same command knows its steps if it was interrupted.
    """
    mark = Mark(mark_key(nonce), run_id, epoch, False, steps)
    _put(store, mark, {})
    return mark.key


def _put(store: Store, mark: Mark, files: Mapping[str, int]) -> None:
    document = {
        **header("collecting"),
        "run_id": mark.run_id,
        "epoch": mark.epoch,
        "carried_out": mark.is_carried_out,
        "steps": [[step, digest] for step, digest in sorted(mark.steps)],
        "files": heapq.nsmallest(_MARK_FILES_MAX, files),
        "file_count": len(files),
    }
    store.put(mark.key, sealed(document))


def marks(store: Store) -> list[Mark]:
    """Return all readable marks under a root.

    Unreadable marks are skipped. A mark only closes a short race, so a damaged one must not block a run for ever.
    """
    listed = []
    for key in sorted(mark_keys(store)):
        try:
            data = store.get(key, _MARK_BYTES_MAX)
            document, _ = decode_sealed(data, "collecting", _MarkDocument, f"{store.url}/{key}")
            listed.append(Mark(key, document.run_id, document.epoch, document.carried_out, frozenset(document.steps)))
        except MissingError:
            continue  # The collector finished after we listed it.
        except (CorruptError, InvalidError) as error:
            logger.debug("an unreadable mark is skipped: %s", error)
    return listed


def remove_marks(store: Store, keys: Iterable[str]) -> None:
    """Remove marks, damaged ones included: after the removal, after giving up, or after their process died."""
    store.delete(list(keys))


def mark_keys(store: Store) -> list[str]:
    """Return the keys of all marks under a root, readable or not."""
    return [entry.key for entry in store.list(MARKS_FOLDER) if _MARK.fullmatch(entry.key)]


def remove_probes(store: Store) -> int:
    """Remove the objects by which processes have asked the store what it refuses; return how many there were.

    A process that asks just now asks once more, with another key.
    """
    keys = [entry.key for entry in store.list(f"{_REPORTS_FOLDER}/") if _PROBE.fullmatch(entry.key)]
    store.delete(keys)
    return len(keys)


def remove(store: Store, to_delete: Unreferenced, epoch: int) -> Unreferenced:
    """Remove manifests, then the files that they named; return what was removed.

    The first deletion is durable before the second begins. So a crash at any point leaves no visible step without
    its files. A manifest that another writer has published at one of the steps meanwhile stays: see `withdraw`.

    Args:
        store: The root of the run.
        to_delete: What may go.
        epoch: Epoch of the caller.
    Raises:
        ConflictError: Another process took over; no file was removed.
        UnavailableError: Storage failed; the next collection continues.
    """
    leave_latest(store, to_delete.manifests)
    # Oldest first: a reader that lists meanwhile still finds the newest step.
    removed = {
        step: digest
        for step, digest in sorted(to_delete.steps.items())
        if _remove_manifest(store, step, digest, manifest_key(step), epoch)
    }
    moved = {key: name for key, name in sorted(to_delete.moved.items()) if _remove_manifest(store, *name, key, epoch)}
    if to_delete.files:
        require_newest(store, epoch)
        store.delete(sorted(to_delete.files))
    remove_folders(store, sorted(to_delete.numbers))
    return replace(to_delete, steps=removed, moved=moved)


def _remove_manifest(store: Store, step: int, digest: str, key: str, epoch: int) -> bool:
    """Remove the manifest of a step from a key if it is still the given one; return whether it was."""
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except (MissingError, CorruptError):
        return False
    if stated_digest(data) != digest:
        return False
    remove_manifest(store, step, key, data, epoch, is_only_copy=True)
    return True


def remove_folders(store: Store, steps: Iterable[int]) -> None:
    """Remove empty step folders, for example those of an interrupted collection."""
    # Deleting a key makes the store remove its folder if that is empty, even if the key does not exist.
    keys = [f"{step_folder(step)}nothing" for step in steps]
    if keys:
        store.delete(keys)
