"""Processes that read packs in memory, or stop in the middle of their copy, while a job saves over and over.

A reader is `python -m tests.distributed.tiers.reader_cases`. It takes a line at a time, `open WAY PATH`, `again` or
`drop`, and answers each with a digest of all bytes that it sees.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from holdfast.backends.stores.shelf import ShelfUpload
from holdfast.backends.stores.syscalls import Syscalls
from holdfast.errors import CheckpointError
from holdfast.settings import Settings
from tests.support.forked_processes import write_whole

SETTINGS = Settings(collect_grace_seconds=0.0, lease_seconds=0.5)
COUNT = 1_500_000
"""Elements of each of two tensors: some windows of the copy."""


def state_of(seed: int) -> dict[str, object]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(COUNT, generator=random) for name in ("a", "b")}


def manager_at(root: Path, near: Path) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        root,
        every=1_000_000,
        process_group=False,
        preemption=False,
        settings=SETTINGS,
        near=holdfast.Tier(near, every=1, keep_last=1),
    )


def refuse_lease(syscalls: Syscalls, fd: int, kind: int) -> None:
    """Answer as a kernel that grants no leases."""
    raise OSError(22, "Invalid argument")


def digest_of(path: Path) -> str:
    """Return a digest of the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def packs_of(step: Path) -> list[Path]:
    """Return the packs of a step."""
    return sorted(step.rglob("*.safetensors"))


def _opened(way: str, path: Path) -> Callable[[], str]:
    """Open a step and keep it open; return what digests the bytes as they are then."""
    if way == "safetensors":
        from safetensors import safe_open

        packs = [safe_open(pack, framework="np").__enter__() for pack in packs_of(path)]

        def see() -> str:
            return _digest_of_arrays([pack.get_tensor(name) for pack in packs for name in sorted(pack.keys())])

    else:
        assert way == "mmap"
        content = holdfast.read(path, mmap=True)
        arrays = [content[name].numpy() for name in sorted(content)]

        def see() -> str:
            return _digest_of_arrays(arrays)

    maps = Path("/proc/self/maps").read_text()
    assert all(str(pack) in maps for pack in packs_of(path)), "a copy would prove nothing"
    return see


def _digest_of_arrays(arrays: list[object]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(memoryview(array).cast("B"))  # type: ignore[arg-type]
    return digest.hexdigest()


def _serve() -> None:
    see: Callable[[], str] | None = None
    for line in sys.stdin:
        order, *rest = line.split()
        if order == "open":
            see = _opened(rest[0], Path(rest[1]))
        if order == "drop":
            see = None
            gc.collect()
        print("dropped" if see is None else see(), flush=True)


def stopped(root: str, near: str, scratch: str, at: str, delay_seconds: str, has_leases: str) -> None:
    """Save steps; stop soon after a call of the fourth copy; go on, and note what the saves have said."""
    torch.set_num_threads(1)
    if not int(has_leases):
        Syscalls.lease = refuse_lease  # type: ignore[method-assign]
    count = 0

    def soon() -> None:
        nonlocal count
        count += 1
        if count == int(at):
            timer = threading.Timer(float(delay_seconds), os.kill, (os.getpid(), signal.SIGSTOP))
            timer.daemon = True
            timer.start()

    manager = manager_at(Path(root), Path(near))
    manager.load(state_of(0))
    for step in (1, 2, 3):
        manager.maybe_save(step, state_of(step)).wait("near")
        while len([*Path(near).glob("step-*/manifest.json")]) > 1:
            time.sleep(0.005)
    room, write = ShelfUpload.room, ShelfUpload.write
    ShelfUpload.room = lambda *given: (soon(), room(*given))[1]  # type: ignore[method-assign]
    ShelfUpload.write = lambda *given: (soon(), write(*given))[1]  # type: ignore[method-assign]
    said = []
    for step in (4, 5, 6):
        try:
            manager.maybe_save(step, state_of(-step)).wait("near")
            said.append("saved")
        except CheckpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    write_whole(Path(scratch) / "said", "\n".join(said))
    manager.close(wait=False)


if __name__ == "__main__":
    _serve()
