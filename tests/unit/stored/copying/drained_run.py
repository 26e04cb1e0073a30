"""A run in a near tier that a real manager has saved, and roots of the same run that a step is drained to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from holdfast._face import wiring
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.memory import MemoryStore
from holdfast.backends.stores.objects.store import ObjectStore
from holdfast.backends.stores.wrappers.retrying import RetryingStore
from holdfast.base.clock import SystemClock
from holdfast.base.ports.observer import Observer
from holdfast.base.ports.store import Store
from holdfast.base.types.manifest import Manifest
from holdfast.core.format.names import EPOCHS_FOLDER, RUN_FILE, step_folder
from holdfast.settings import Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint
from holdfast.stored.checkpoint.location import CheckpointLocation
from holdfast.stored.copying.step_drain import StepDrain
from holdfast.stored.repository.catalog import read_manifest
from holdfast.stored.repository.epochs import newest_epoch
from holdfast.stored.repository.removal import named_files
from holdfast.stored.repository.timeline_records import TIMELINES_FOLDER
from tests.support.crashed_run import SETTINGS, run_at, training_state
from tests.support.object_server import ObjectServer

STEPS = (10, 20, 30)
_numbers = itertools.count()


def near_at(folder: Path, steps: Sequence[int] = STEPS, settings: Settings = SETTINGS) -> LocalStore:
    """Save steps of which one tensor never changes; return the store."""
    store = LocalStore(folder, settings=settings)
    with run_at(store, settings=settings) as manager:
        for step in steps:
            manager.save(step, training_state(step)).wait()
    return store


def root_of(kind: str, folder: Path, objects: ObjectServer) -> Store:
    """Return an empty root."""
    if kind == "memory":
        return MemoryStore(f"drained-{next(_numbers)}", object_bytes_max=1 << 20)
    if kind == "local":
        return LocalStore(folder / f"root-{next(_numbers)}", settings=SETTINGS)
    settings = objects.settings()
    return RetryingStore(ObjectStore(objects.new_url(), settings=settings), settings)


def join(near: Store, root: Store) -> int:
    """Make a root one of the run in the near tier as of now: same id, epochs, lists, timelines; return the epoch."""
    for key in (RUN_FILE, *(entry.key for prefix in (EPOCHS_FOLDER, TIMELINES_FOLDER) for entry in near.list(prefix))):
        root.put(key, near.get(key, 1 << 20))
    return newest_epoch(near)


def manifest_at(store: Store, step: int) -> Manifest:
    return read_manifest(store, step_folder(step))


def drain_of(near: Store, root: Store, step: int, observer: Observer | None = None) -> StepDrain:
    return StepDrain(near, root, manifest_at(near, step), SystemClock(), wiring.codecs(), observer)


def steps_in(store: Store) -> list[str]:
    """Return the folders of the steps that have a manifest."""
    return [entry.key.split("/")[0] for entry in store.list("") if entry.key.endswith("/manifest.json")]


def require_same(near: Store, root: Store, step: int) -> None:
    """Require that a step in the root is that of the near tier bit for bit, and that every chunk verifies."""
    location = CheckpointLocation(root, step_folder(step), step, root=root)
    checkpoint = Checkpoint(location, SETTINGS, lambda *_: None, codecs=wiring.codecs())  # type: ignore[arg-type]
    assert list(checkpoint.verify()) == []
    assert checkpoint.manifest.digest == manifest_at(near, step).digest
    for key, size in named_files(checkpoint.manifest).items():
        assert root.get(key, size) == near.get(key, size), key
    unfinished = [entry.key for entry in root.list("copying/")]
    assert not unfinished, unfinished


def frozen_pack(near: Store, step: int) -> str:
    """Return the key of the pack of another step that a step refers to."""
    names = [pack.name for pack in manifest_at(near, step).packs if pack.name.startswith("step-")]
    (pack,) = names
    return pack


def flip(folder: Path, key: str) -> None:
    """Damage the last byte of a file, and leave its other names as they are."""
    data = bytearray((folder / key).read_bytes())
    data[-1] ^= 1
    (folder / key).unlink()
    (folder / key).write_bytes(data)
