"""What ranks do in the tests of system calls: one save whose calls are counted on each rank."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import holdfast
from holdfast.backends.stores.syscalls import Syscalls
from tests.support.gloo_worlds import World


def counted_save(world: World) -> dict[str, object]:
    """Save two steps; return the calls of this rank that made files and folders durable in the second."""
    state = {"shared": torch.ones(100_000), f"own{world.rank}": torch.ones(1000)}
    with holdfast.CheckpointManager(world.scratch / "run", preemption=False) as manager:
        manager.save(1, state).wait()
        for tensor in state.values():
            tensor += 1
        dist.barrier()
        with _synced() as synced:
            manager.save(2, state).wait()
            dist.barrier()
    root = os.path.realpath(world.scratch / "run")
    folders = [os.path.relpath(path, root) for path, is_folder in synced if is_folder]
    files = [os.path.relpath(path, root) for path, is_folder in synced if not is_folder]
    return {"folders": folders, "files": files}


@contextmanager
def _synced() -> Iterator[list[tuple[str, bool]]]:
    """Lend the list of paths that are made durable, each with whether it is a folder."""
    synced: list[tuple[str, bool]] = []
    real = Syscalls.fsync

    def fsync(self: Syscalls, fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), stat.S_ISDIR(os.fstat(fd).st_mode)))
        real(self, fd)

    Syscalls.fsync = fsync  # type: ignore[method-assign]
    try:
        yield synced
    finally:
        Syscalls.fsync = real  # type: ignore[method-assign]
