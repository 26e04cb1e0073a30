"""One rank of the bench: interleaved rounds, each measured alike for every contender."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from bench.state import sharded_state, tiny_state

Seconds = dict[str, list[float]]


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

    What is cached already is dropped first: how fast Linux gives a page away depends on how often it was read, and a
    cold load leaves pages behind with one contender and none with the other.
    """
    forget_pages(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def on_first_rank(work: Callable[[], object]) -> None:
    """Do something on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def save_dcp(state: dict[str, torch.Tensor], folder: Path, threads: int) -> None:
    """Save with DCP, durably: its writer fsyncs its files."""
    dcp_save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=threads, sync_files=True))


def load_dcp(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Load with DCP."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))


def raw_write(folder: Path, count: int) -> None:
    """Write and fsync this rank's share with plain direct windows: the limit of the disk."""
    import mmap

    window = 4 << 20
    memory = mmap.mmap(-1, window)
    memory.write(os.urandom(1 << 16) * (window >> 16))
    fd = os.open(folder / f"raw{dist.get_rank()}", os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_TRUNC, 0o600)
    os.posix_fallocate(fd, 0, count)
    for offset in range(0, count, window):
        os.pwrite(fd, memory, offset)
    os.fsync(fd)
    os.close(fd)


def large_round(root: Path, saved: dict[str, torch.Tensor], target: dict[str, torch.Tensor], seconds: Seconds) -> None:
    """Save and load the large state once with every contender."""
    total_bytes = sum(tensor.to_local().nbytes for tensor in saved.values())
    on_first_rank(lambda: (shutil.rmtree(root, ignore_errors=True), root.mkdir(parents=True)))
    seconds.setdefault("raw_write", []).append(timed(lambda: raw_write(root, total_bytes)))
    seconds.setdefault("save", []).append(timed(lambda: holdfast.save(root / "ours", saved)))
    for threads in (1, 2):
        key = f"save_dcp_{threads}"
        seconds.setdefault(key, []).append(timed(lambda n=threads: save_dcp(saved, root / f"dcp{n}", n)))
    for kind, prepare in (("cold", forget_pages), ("warm", touch_pages)):
        on_first_rank(lambda work=prepare: work(root / "ours"))
        seconds.setdefault(f"load_{kind}", []).append(timed(lambda: holdfast.load(root / "ours", target)))
        require_equal(saved, target)
        on_first_rank(lambda work=prepare: work(root / "dcp1"))
        seconds.setdefault(f"load_{kind}_dcp", []).append(timed(lambda: load_dcp(target, root / "dcp1")))


def stall_round(root: Path, saved: dict[str, torch.Tensor], seconds: Seconds) -> None:
    """Measure how long a save in the background blocks, its arena warm, beside one copy of the same bytes."""
    copies = {name: torch.empty_like(tensor.to_local()).zero_() for name, tensor in saved.items()}

    def copy() -> None:
        for name, tensor in saved.items():
            copies[name].copy_(tensor.to_local())

    on_first_rank(lambda: shutil.rmtree(root, ignore_errors=True))
    with holdfast.CheckpointManager(root) as manager:
        manager.save(1, saved).wait()
        seconds.setdefault("memcpy", []).append(timed(copy))
        seconds.setdefault("stall_copy", []).append(timed(lambda: manager.save(2, saved)))


def tiny_round(root: Path, count: int, seconds: Seconds) -> None:
    """Save and load many tiny tensors once with every contender, on rank 0 alone."""
    saved, target = tiny_state(count, fill=True), tiny_state(count, fill=False)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)

    def add(key: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        seconds.setdefault(key, []).append(time.perf_counter() - start)

    add("tiny_save", lambda: holdfast.save(root / "ours", saved, process_group=False))
    add("tiny_save_dcp", lambda: dcp.save(saved, checkpoint_id=root / "dcp", no_dist=True))
    add("tiny_load", lambda: holdfast.load(root / "ours", target, process_group=False))
    require_equal(saved, target)
    add("tiny_load_dcp", lambda: dcp.load(target, checkpoint_id=root / "dcp", no_dist=True))
    saved, target = tiny_state(5 * count, fill=True), tiny_state(5 * count, fill=False)
    add("tiny_save_five_times", lambda: holdfast.save(root / "more", saved, process_group=False))
    add("tiny_load_five_times", lambda: holdfast.load(root / "more", target, process_group=False))


def require_equal(saved: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """A bench that measures a wrong load measures nothing."""
    for name, tensor in saved.items():
        ours = loaded[name]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in (tensor, ours)]
        assert torch.equal(*local), name


def main(folder: str, total_mib: int, rounds: int, tiny: int) -> None:
    """Run every round on this rank; rank 0 prints the seconds as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    root = Path(folder)
    saved = sharded_state(mesh, total_mib << 20, fill=True)
    target = sharded_state(mesh, total_mib << 20, fill=False)
    seconds: Seconds = {}
    large_round(root / "warmup", saved, target, {})
    for _ in range(rounds):
        large_round(root / "large", saved, target, seconds)
    for _ in range(rounds):
        stall_round(root / "stall", saved, seconds)
    for _ in range(rounds):
        on_first_rank(lambda: tiny_round(root / "tiny", tiny, seconds))
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
