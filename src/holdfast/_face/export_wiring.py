"""Chooses the implementations of an export: writers of other systems' formats, the destination, worker processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from holdfast._face.wiring import checkpoint_at, for_copy_of, is_named_by_url, parent_of, store_at
from holdfast.backends.stores.local import LocalStore
from holdfast.backends.stores.local_place import LocalPlace
from holdfast.base.clock import SystemClock
from holdfast.base.layouts.layout import Layouts
from holdfast.base.ports.foreign import Writer
from holdfast.base.ports.store import Store
from holdfast.base.types.export import SHARD_BYTES, ExportFile, ExportOptions
from holdfast.errors import InvalidError
from holdfast.offline.export.export import Export
from holdfast.offline.export.object_place import OBJECT_SHARE, ObjectPlace
from holdfast.offline.export.request import WorkerPool
from holdfast.offline.export.workers import worker_main, worker_pool
from holdfast.settings import MIB, Settings
from holdfast.stored.checkpoint.checkpoint import Checkpoint


@cache
def writers() -> tuple[Writer, ...]:
    """Return the writers of other systems' formats."""
    from holdfast.backends.foreign.dcp.writer import DcpWriter
    from holdfast.backends.foreign.huggingface.safetensors_writer import SafetensorsWriter
    from holdfast.backends.foreign.torch.writer import TorchWriter

    return SafetensorsWriter(), TorchWriter(), DcpWriter()


HOLDFAST = "holdfast"
"""Name of our own format in `export(to=…)`."""


EXPORT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes to which an export can cast the floating tensors of a model."""

_SHARDS_IN_FLIGHT = 5
"""Files of the default size that are filled or sent together, where files are sent whole."""


def resources_of(
    destination: object, settings: Settings, memory_bytes: int, workers: int, shard_bytes: int | None
) -> tuple[Settings, int]:
    """Return how each worker of an export uses storage, and the most bytes of tensors in one file.

    Args:
        destination: The path or URL.
        settings: Of the caller. In a store of objects the memory of an export bounds those on their way.
        memory_bytes, workers: Of the whole export.
        shard_bytes: As the caller chose it; None for the default: that of Hugging Face, and less where files are sent
            whole from memory.
    """
    if isinstance(store_at(destination, settings), LocalStore):
        return settings, SHARD_BYTES if shard_bytes is None else shard_bytes
    room = min(max(int(memory_bytes // workers * OBJECT_SHARE), MIB), 1 << 40)
    cap = settings.max_bytes_per_second
    share = None if cap is None else max(cap // workers, 1)
    object_store = replace(settings.object_store, bytes_in_flight_max=room)
    settings = replace(settings, object_store=object_store, max_bytes_per_second=share)
    return settings, max(min(room // _SHARDS_IN_FLIGHT, SHARD_BYTES), 1) if shard_bytes is None else shard_bytes


def require_options(dtype: str | None, shard_bytes: int | None, layout: Layouts, **counts: object) -> None:
    """Refuse a dtype that no export casts to, and a count that is not positive; no `shard_bytes` is the default.

    Raises:
        InvalidError: One of them is wrong.
    """
    if shard_bytes is not None:
        counts = {"shard_bytes": shard_bytes, **counts}
    if layout is not None and counts["workers"] != 1:
        raise InvalidError(f"workers={counts['workers']!r} with a layout; expected 1: one process follows a layout")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise InvalidError(f"dtype={dtype!r}; expected one of {', '.join(EXPORT_DTYPES)}, or None")
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InvalidError(f"{name}={value!r}; expected a positive whole number")


def export_of(
    source: object,
    destination: object,
    to: object,
    options: ExportOptions,
    settings: Settings,
    step: object = None,
    layout: Layouts = None,
) -> Export:
    """Return a planned export of a checkpoint, or of one step of the run at `source`.

    Raises:
        InvalidError: The format is unknown or cannot hold the checkpoint, or a path is wrong.
        CheckpointError: The checkpoint cannot be read.
    """
    by_name = {writer.name: writer for writer in writers()}
    if to not in by_name:
        raise InvalidError(f"to={to!r}; expected one of {', '.join(by_name)}, {HOLDFAST}")
    store, writer = store_at(destination, settings), by_name[to]
    checkpoint = checkpoint_at(source, settings, step, layout)
    files = writer.files(checkpoint.content, options)
    if isinstance(store, LocalStore):
        local = LocalPlace(store.url, file_mode=for_copy_of(checkpoint.url, settings).file_mode)
        local.require_outside(checkpoint.url)
        return Export(checkpoint, local, writer.name, files, SystemClock())
    place = _object_place(checkpoint, store, writer.name, files, settings)
    return Export(checkpoint, place, writer.name, files, SystemClock())


def _object_place(
    checkpoint: Checkpoint, store: Store, to: str, files: Sequence[ExportFile], settings: Settings
) -> ObjectPlace:
    folder = store.with_any_names()
    if folder is None:
        raise InvalidError(f"{store.url}: cannot hold the files of other systems; expected a folder or another URL")
    if f"{store.url}/".startswith(f"{checkpoint.url}/"):
        raise InvalidError(f"{store.url}: is inside {checkpoint.url}, which is exported; expected a place outside it")
    if not files:
        raise InvalidError(f"{checkpoint.url}: has nothing that {to} holds; expected a tensor")
    if any(file.name for file in files):
        return ObjectPlace(folder)
    above = parent_of(store, settings)
    around = None if above is None else above[0].with_any_names()
    if above is None or around is None:
        raise InvalidError(f"{folder.url}: {to} is one file; expected the URL of an object in a bucket")
    return ObjectPlace(around, above[1])


def export_pool(source: object, destination: object, to: str, options: ExportOptions, settings: Settings) -> WorkerPool:
    """Return the worker processes of an export; arguments as `export_of`.

    Raises:
        InvalidError: A store that no other process can open: in the memory of this process, or of the user.
    """
    stores = [store_at(path, settings) for path in (source, destination)]
    inner = next((store for store in stores if not is_named_by_url(store)), None)
    if inner is not None:
        raise InvalidError(f"{inner.url}: no other process can open this store; expected workers=1")
    # A worker may begin in another folder. A URL of another place than a folder is the same there.
    places = [
        os.path.abspath(store.url) if isinstance(store, LocalStore) else str(path)
        for path, store in zip((source, destination), stores, strict=True)
    ]
    return worker_pool(WORKER_ENTRY, places[0], places[1], to, options, settings)


WORKER_ENTRY = "holdfast._face.export_wiring:export_worker"


def export_worker() -> int:
    """Carry out the share of an export that standard input describes; return an exit status."""
    return worker_main(sys.stdin.readline(), export_of)
