"""Equal conditions for all contenders: a quiet disk, cold or warm pages, one clock, and a check of loaded values."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench import device
from bench.part import Round

_BLOCK = bytearray(1 << 22)


def barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the slowest rank has finished."""
    device.settle()
    barrier()
    start = time.perf_counter()
    work()
    barrier()
    return time.perf_counter() - start


def measured(name: str, work: Callable[[], object], *, together: bool = True) -> Round:
    """Return the seconds until the slowest rank has finished, and the processor seconds of all ranks.

    Args:
        name: Key of the seconds; that of the processor seconds has `_cpu` behind it.
        work: What is measured.
        together: Whether the ranks begin together. If not, the seconds begin with the first rank.
    """
    if together:
        device.settle()
        barrier()
    # The ranks run on one machine, and its processes share this clock.
    before, start = time.process_time(), time.perf_counter()
    work()
    stop, spent = time.perf_counter(), torch.tensor([time.process_time() - before], dtype=torch.float64)
    dist.all_reduce(spent)
    return {name: slowest(stop) + slowest(-start), f"{name}_cpu": float(spent)}


def of_first_rank(text: str) -> str:
    """Return the text of rank 0, on every rank."""
    texts = [text]
    dist.broadcast_object_list(texts)
    return texts[0]


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def on_first_rank(work: Callable[[], object]) -> None:
    """Do something on rank 0 while the others wait."""
    if rank() == 0:
        work()
    barrier()


def quiet_disk() -> None:
    """Write out all dirty pages, so that no contender pays for the one before."""
    on_first_rank(os.sync)


def emptied(folder: Path) -> Path:
    """Return an empty folder; create it if needed."""
    on_first_rank(lambda: (shutil.rmtree(folder, ignore_errors=True), folder.mkdir(parents=True)))
    return folder


def removed(folder: Path) -> None:
    """Remove a folder."""
    on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))


def forget_pages(folder: Path) -> None:
    """Drop a folder's clean pages from the page cache, so that the next read is cold."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def touch_pages(folder: Path) -> None:
    """Read a folder's files once, so that the next read is warm.

    Cached pages are dropped first. How fast Linux drops a page depends on how often it was read, and a cold load leaves
    pages in the cache with some contenders only.
    """
    forget_pages(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(_BLOCK):
                    pass


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_bytes(state: dict[str, torch.Tensor]) -> int:
    """Return the bytes of this rank's part of a state."""
    return sum(local(tensor).nbytes for tensor in state.values())


def require_equal(saved: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """Refuse a load that filled other values than were saved: its time means nothing."""
    for name, tensor in saved.items():
        assert torch.equal(local(tensor), local(loaded[name])), name


def zeroed(state: dict[str, torch.Tensor]) -> None:
    """Zero the values that an earlier load filled."""
    for tensor in state.values():
        local(tensor).zero_()


def say(line: str) -> None:
    """Print a line of progress, on rank 0 only."""
    if rank() == 0:
        print(f"    {line}", flush=True)
