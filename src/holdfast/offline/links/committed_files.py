"""The files of a run that a manifest names: all others may be of a save under way, whose packs are not complete yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.errors import CheckpointError
from holdfast.format.manifest import MANIFEST_BYTES_MAX
from holdfast.format.names import (
    MANIFEST_FILE,
    is_attempt_folder,
    step_folder,
    step_of_folder,
    step_of_pack,
    superseded_in,
)
from holdfast.ports.store import Store
from holdfast.repository.catalog import manifest_in
from holdfast.repository.publish import get_or_none
from holdfast.repository.quarantine import quarantined, superseded_packs
from holdfast.types.manifest import Manifest


def step_of_manifest(key: str) -> int | None:
    """Return the step of which a key of a run names a manifest, in its folder or under `superseded/`; None if none."""
    moved = superseded_in(key)
    if moved is not None:
        return moved[0]
    folder, _, name = key.rpartition("/")
    return step_of_folder(folder) if name == MANIFEST_FILE else None


def manifest_at(key: str, data: bytes) -> Manifest:
    """Return the manifest of a run that is stored at a key.

    Raises:
        CheckpointError: It is damaged, or of a newer format.
    """
    return manifest_in("" if superseded_in(key) is not None else key.removesuffix(MANIFEST_FILE), data, key)


def committed_files(store: Store, manifests: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a key is no file of an attempt, or one that a manifest needs.

    While a manifest cannot be read, it may need any file: then every key counts.

    Args:
        store: The root of the run.
        manifests: Keys of its manifests.
    """
    attempts = {
        f"{step_folder(step)}{attempt}"
        for step, records in quarantined(store).items()
        for record in records.values()
        for attempt in record.attempts
    }
    packs = set(superseded_packs(store))
    for key in manifests:
        data = get_or_none(store, key, MANIFEST_BYTES_MAX)
        if data is None:
            continue
        try:
            manifest = manifest_at(key, data)
        except CheckpointError:
            return lambda key: True
        packs |= {pack.name for pack in manifest.packs if step_of_pack(pack.name) is not None}
        if manifest.step is not None:
            attempts.add(f"{step_folder(manifest.step)}{manifest.attempt}")

    def is_committed(key: str) -> bool:
        step, _, rest = key.partition("/")
        attempt, _, name = rest.partition("/")
        if not name or step_of_folder(step) is None or not is_attempt_folder(attempt):
            return True
        return f"{step}/{attempt}" in attempts or key in packs

    return is_committed
