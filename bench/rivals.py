"""The rivals. Each is called as its own documentation says, and is durable when it returns."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import save as dcp_sync_save

from bench.conditions import local, rank

State = dict[str, torch.Tensor]


# ------------------------------------------------------------------------------- torch.distributed.checkpoint


def dcp_save(state: State, folder: Path, threads: int, no_dist: bool = False) -> None:
    """Save with DCP, durably: its writer calls fsync on its files."""
    writer = dcp.FileSystemWriter(folder, thread_count=threads, sync_files=True)
    dcp_sync_save(state, storage_writer=writer, no_dist=no_dist)


def dcp_load(state: State, folder: Path, no_dist: bool = False) -> None:
    """Load with DCP."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=no_dist)


class DcpAsync:
    """DCP's async save with one stager. Where possible the stager is kept from save to save, so that its memory is
    warm.
    """

    STAGERS = ("thread", "thread_kept", "background_kept", "process_kept", "pinned_kept")
    """`thread`: as called with no stager, fresh memory each time. `*_kept`: a `DefaultStager` of ours; `background`
    stages on a thread, `process` saves from another process out of shared memory, `pinned` stages into pinned memory
    (needs a GPU)."""

    def __init__(self, name: str) -> None:
        """Make the stager.

        Raises:
            AssertionError, RuntimeError: What torch says where this stager cannot run.
        """
        self._process = name == "process_kept"
        self._stager: DefaultStager | None = None
        if name != "thread":
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=name == "pinned_kept",
                    use_shared_memory=self._process,
                    use_async_staging=name == "background_kept",
                    use_non_blocking_copy=name == "pinned_kept",
                )
            )
        # Its background thread runs collectives: they must not meet those of the bench.
        self._group = dist.new_group(backend="gloo")

    def begin(self, state: State, folder: Path) -> Future[object]:
        """Begin a save; return once training may change the state."""
        begun = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD,
            process_group=self._group,
        )
        if isinstance(begun, AsyncSaveResponse):
            begun.staging_completion.result()
            return begun.upload_completion
        return begun

    def close(self) -> None:
        """Release the memory."""
        if self._stager is not None:
            self._stager.close()


# ------------------------------------------------------------------------------- torch_checkpointing


def torch_checkpointing_version() -> str | None:
    """Return its version; None if it is not installed."""
    try:
        from torch_checkpointing.version import __version__
    except ImportError:
        return None
    return str(__version__)


class TorchCheckpointing:
    """Meta's torch_checkpointing, saving synchronously.

    Without a resharder: with one, its aggregation of sharding metadata wants CUDA. Without direct I/O, which its
    writer opens files for but gives unaligned memory to, so that ext4 and xfs refuse. It never fsyncs; we do, where it
    calls back before it renames the finished checkpoint into its place.
    """

    def __init__(self, threads: int) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._threads = threads
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=threads)),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                pre_finalize_callback=_fsync_own_files,
            )
        )

    def save(self, state: State, folder: Path) -> None:
        """Save one item for each thread of the manager, because one thread writes each whole item."""
        items: dict[str, State] = {f"model{number}": {} for number in range(self._threads)}
        for number, (name, tensor) in enumerate(state.items()):
            items[f"model{number % self._threads}"][name] = tensor
        self._manager.save(str(folder), items)

    def close(self) -> None:
        """Stop its threads and processes."""
        self._manager.close()


def _fsync_own_files(written: object) -> None:
    for path in Path(written.path).glob(f"*_{rank()}.*"):  # type: ignore[attr-defined]
        _fsync(path)


# ------------------------------------------------------------------------------- one file per rank


def torch_save(state: State, folder: Path) -> None:
    """Save this rank's part with torch.save, and call fsync on the file."""
    path = folder / f"rank{rank()}.pt"
    # A rival's own format, and never read back.
    torch.save({name: local(tensor) for name, tensor in state.items()}, path)  # noqa: TID251
    _fsync(path)


def safetensors_save(state: State, folder: Path) -> None:
    """Save this rank's part with safetensors, and call fsync on the file."""
    path = folder / f"rank{rank()}.safetensors"
    safetensors.torch.save_file({name: local(tensor) for name, tensor in state.items()}, path)
    _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
