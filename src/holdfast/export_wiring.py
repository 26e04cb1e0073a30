"""Chooses the implementations of an export: writers of other systems' formats, the destination, worker processes."""

from __future__ import annotations

import os
import sys
from functools import cache

from holdfast.clock import SystemClock
from holdfast.errors import InvalidError
from holdfast.offline.export.export import Export, WorkerPool
from holdfast.offline.export.workers import worker_main, worker_pool
from holdfast.ports.foreign import Writer
from holdfast.settings import Settings
from holdfast.stores.destination import LocalDestination
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from holdfast.types.export import ExportOptions
from holdfast.wiring import checkpoint_at, store_at


@cache
def writers() -> tuple[Writer, ...]:
    """Return the writers of other systems' formats."""
    from holdfast.foreign.dcp.writer import DcpWriter
    from holdfast.foreign.huggingface.safetensors_writer import SafetensorsWriter
    from holdfast.foreign.torch.writer import TorchWriter

    return SafetensorsWriter(), TorchWriter(), DcpWriter()


HOLDFAST = "holdfast"
"""Name of our own format in `export(to=…)`."""


def export_of(source: object, destination: object, to: object, options: ExportOptions, settings: Settings) -> Export:
    """Return a planned export.

    Raises:
        InvalidError: The format is unknown or cannot hold the checkpoint, or a path is wrong.
        CheckpointError: The checkpoint cannot be read.
    """
    by_name = {writer.name: writer for writer in writers()}
    if to not in by_name:
        raise InvalidError(f"to={to!r}; expected one of {', '.join(by_name)}, {HOLDFAST}")
    store = store_at(destination, settings)
    if not isinstance(store, LocalStore):
        raise InvalidError(f"{store.url}: export writes files; expected a path of a file system")
    files = LocalDestination(store.url, file_mode=settings.file_mode)
    checkpoint = checkpoint_at(source, settings)
    files.require_outside(checkpoint.url)
    return Export(checkpoint, files, by_name[to], options, SystemClock())


def export_pool(source: object, destination: object, to: str, options: ExportOptions, settings: Settings) -> WorkerPool:
    """Return the worker processes of an export; arguments as `export_of`.

    Raises:
        InvalidError: The source is in the memory of this process, which no other process can read.
    """
    if isinstance(store_at(source, settings), MemoryStore):
        raise InvalidError(f"{source}: is in the memory of this process; expected workers=1")
    # A worker may begin in another folder. A URL of another place than a folder is the same there.
    places = [
        path if "://" in path else os.path.abspath(os.path.expanduser(path))
        for path in (str(each).removeprefix("file://") for each in (source, destination))
    ]
    return worker_pool(WORKER_ENTRY, places[0], places[1], to, options, settings)


WORKER_ENTRY = "holdfast.export_wiring:export_worker"


def export_worker() -> int:
    """Carry out the share of an export that standard input describes; return an exit status."""
    return worker_main(sys.stdin.readline(), export_of)
