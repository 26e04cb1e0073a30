"""Removing from a run what nobody needs: what lies in a step's folder, marks of what is about to go, and the removal.

A mark is put before anything is removed, and names all of it; before the last look it is put again, as one that is
carried out. Whoever is about to rely on a step, by reading or tagging it, says so first and looks for such marks then;
whoever removes looks for these sayings after that. One of the two sees the other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.errors import CorruptError, InvalidError, MissingError
from holdfast.format.digest import hex_digest_of
from holdfast.format.manifest import MANIFEST_BYTES_MAX
from holdfast.format.names import (
    MANIFEST_FILE,
    is_attempt_file,
    is_attempt_folder,
    is_file_url,
    step_folder,
    step_of_pack,
)
from holdfast.format.sealed_json import Digest, EpochNumber, StepNumber, decode_sealed, header, sealed, stated_digest
from holdfast.ports.store import Store
from holdfast.repository.catalog import manifest_in
from holdfast.repository.publish import packs_named_by
from holdfast.settings import MIB
from holdfast.types.epoch import Fence
from holdfast.types.manifest import Manifest
from holdfast.types.removal import StepFiles, Unreferenced

logger = logging.getLogger(__name__)

MARKS_FOLDER = "collecting/"
"""Folder of the marks, under the root of a run."""

_REPORTS_FOLDER = "reports"
_MARK = re.compile(r"collecting/[0-9a-f]{32}\.json", re.ASCII)
_MARK_BYTES_MAX = 256 * MIB


@dataclass(frozen=True, slots=True)
class Mark:
    """What somebody is about to remove."""

    key: str
    """Key of its record."""

    run_id: str
    """The run."""

    epoch: int
    """Under which it is removed; nobody removes it once that is over."""

    is_carried_out: bool
    """Whether it is too late to say that a step is wanted."""

    steps: Mapping[int, str]
    """Steps that lose their manifest, each with the digest of it."""


def inspect_step(
    store: Store, step: int, fence: Fence, pinned: Iterable[str] = ()
) -> tuple[StepFiles, Manifest | None, list[str]]:
    """Return what lies in the folder of a step, its manifest if it can be read, and keys that no save gives.

    The latter are nobody's to remove: whoever put them there may want them.

    Args:
        store: The root of the run.
        step: The step.
        fence: Which manifests count.
        spared: Attempts that are under quarantine.
    Raises:
        UnavailableError: Storage failed.
    """
    folder = step_folder(step)
    digest, manifest, counts = _manifest_at(store, step, fence)
    attempts: dict[str, dict[str, int]] = {}
    reports: dict[str, int] = {}
    strangers = []
    for entry in store.list(folder):
        place, _, name = entry.key.removeprefix(folder).partition("/")
        if is_attempt_folder(place) and is_attempt_file(name):
            attempts.setdefault(place, {})[entry.key] = entry.bytes
        elif place == _REPORTS_FOLDER and name:
            reports[entry.key] = entry.bytes
        elif entry.key != folder + MANIFEST_FILE:
            strangers.append(entry.key)
    found = StepFiles(
        step=step,
        digest=digest,
        attempt=None if manifest is None else manifest.attempt,
        counts=counts,
        attempts=attempts,
        reports=reports,
        packs=packs_named_by([] if manifest is None else [manifest]),
        pinned=frozenset(pinned),
    )
    return found, manifest, strangers


def _manifest_at(store: Store, step: int, fence: Fence) -> tuple[str | None, Manifest | None, bool]:
    """Return what tells the manifest of a step from another, the manifest, and whether it counts."""
    key = step_folder(step) + MANIFEST_FILE
    try:
        data = store.get(key, MANIFEST_BYTES_MAX)
    except MissingError:
        return None, None, False
    except (CorruptError, InvalidError):
        # Too large for one, or nothing that we may read: not ours to judge.
        return "", None, True
    try:
        manifest = manifest_in(step_folder(step), data, f"{store.url}/{key}")
    except (CorruptError, InvalidError):
        return stated_digest(data) or hex_digest_of(data), None, True
    return manifest.digest, manifest, fence.admits(step, manifest.epoch, manifest.digest)


def is_pack_key(key: str) -> bool:
    """Return whether a key under the root of a run is that of a pack."""
    return step_of_pack(key) is not None


def named_files(manifest: Manifest) -> dict[str, int]:
    """Return the bytes, by key under the root, of every file of the run that the manifest of a step names."""
    assert manifest.step is not None, "a run holds steps"
    overview = () if manifest.overview is None else (manifest.overview,)
    own = f"{step_folder(manifest.step)}{manifest.attempt}/"
    return {
        file.name if step_of_pack(file.name) is not None else own + file.name: file.bytes
        for file in (*manifest.packs, *manifest.parts, *manifest.indexes, *overview)
        if not is_file_url(file.name)
    }


class _MarkDocument(msgspec.Struct):
    run_id: str
    epoch: EpochNumber
    carried_out: bool
    steps: list[tuple[StepNumber, Digest]]


def put_mark(
    store: Store, run_id: str, nonce: str, epoch: int, to_delete: Unreferenced, *, is_carried_out: bool
) -> Mark:
    """Say what is about to be removed, or that it is now."""
    mark = Mark(f"{MARKS_FOLDER}{nonce}.json", run_id, epoch, is_carried_out, to_delete.steps)
    document = {
        **header("collecting"),
        "run_id": run_id,
        "epoch": epoch,
        "carried_out": is_carried_out,
        "steps": [[step, digest] for step, digest in sorted(to_delete.steps.items())],
        "files": sorted(to_delete.files),
    }
    store.put(mark.key, sealed(document))
    return mark


def marks(store: Store) -> list[Mark]:
    """Return every mark under a root; one that cannot be read counts for nothing.

    A mark protects who is late by a moment, and must not keep everybody from a run for ever.
    """
    found = []
    for key in sorted(entry.key for entry in store.list(MARKS_FOLDER)):
        if not _MARK.fullmatch(key):
            continue
        try:
            found.append(_decoded(key, store.get(key, _MARK_BYTES_MAX), f"{store.url}/{key}"))
        except MissingError:
            continue  # Carried out since it was listed.
        except (CorruptError, InvalidError) as error:
            logger.debug("a mark is passed over: %s", error)
    return found


def _decoded(key: str, data: bytes, where: str) -> Mark:
    document, _ = decode_sealed(data, "collecting", _MarkDocument, where)
    return Mark(key, document.run_id, document.epoch, document.carried_out, dict(document.steps))


def remove_marks(store: Store, keys: Iterable[str]) -> None:
    """Forget marks, damaged ones too: carried out, given up, or left by a process that is gone."""
    store.delete(list(keys))


def mark_keys(store: Store) -> list[str]:
    """Return the keys of every mark under a root."""
    return [entry.key for entry in store.list(MARKS_FOLDER) if _MARK.fullmatch(entry.key)]


def remove(store: Store, to_delete: Unreferenced) -> None:
    """Remove manifests first, and once that is durable what they named; killed anywhere, no step is half there.

    Raises:
        UnavailableError: Storage failed; the next collection goes on.
    """
    # The oldest first: whoever lists meanwhile never misses a newer one.
    manifests = [step_folder(step) + MANIFEST_FILE for step in sorted(to_delete.steps)]
    if manifests:
        store.delete(manifests)
    if to_delete.files:
        store.delete(sorted(to_delete.files))


def remove_folders(store: Store, steps: Iterable[int]) -> None:
    """Remove the folders of steps in which no object lies; one that a dead collection left, say."""
    # A key that is absent still has its folder looked at.
    keys = [f"{step_folder(step)}nothing" for step in steps]
    if keys:
        store.delete(keys)
