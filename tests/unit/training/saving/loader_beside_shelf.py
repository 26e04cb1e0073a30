"""A training whose DataLoader workers pass batches through a small `/dev/shm`, beside a near tier there.

`python -m tests.unit.training.saving.loader_beside_shelf ROOT`, in a mount namespace of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.errors import UnavailableError
from holdfast.settings import Settings

MIB = 1 << 20
STAYS_FREE = 64 * MIB
BATCHES, BATCH_BYTES, STATE_BYTES = 40, 4 * MIB, 24 * MIB


class Samples(Dataset[torch.Tensor]):
    """Samples of a MiB."""

    def __len__(self) -> int:
        return BATCHES * BATCH_BYTES // MIB

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((MIB // 4,), float(number))


def main() -> None:
    """Train with a save near each step; the workers must live, and find the part of the mount that stays free."""
    torch.set_num_threads(1)
    state = {"weights": torch.zeros(STATE_BYTES // 4)}
    loader = DataLoader(Samples(), batch_size=BATCH_BYTES // MIB, num_workers=2, prefetch_factor=2)
    saved, refused, least = 0, 0, 1 << 40
    with holdfast.CheckpointManager(
        sys.argv[1],
        every=10,
        process_group=False,
        preemption=False,
        settings=Settings(collect_grace_seconds=2.0),
        near=holdfast.Tier("/dev/shm/near", every=1, keep_last=2, bytes_max=1 << 40),
    ) as manager:
        manager.load(state)
        for step, batch in enumerate(loader, 1):
            state["weights"].fill_(float(batch[0, 0]) + step)
            handle = manager.maybe_save(step, state)
            assert handle is not None
            try:
                handle.wait("staged")
                handle.wait("near")
                saved += 1
            except UnavailableError:
                refused += 1
            found = os.statvfs("/dev/shm")
            batches = sum(path.stat().st_size for path in Path("/dev/shm").glob("torch_*"))
            least = min(least, found.f_bavail * found.f_frsize + batches)
        manager.close(wait=False)
    print(f"{step} steps, {saved} saved, {refused} refused, at least {least // MIB} MiB free without the batches")
    assert step == BATCHES and saved and refused, "the mount was full for the near tier, and had been free before"
    # Batches that are in no file of a name are not counted: two a worker, and the one in use.
    assert least >= STAYS_FREE - 6 * BATCH_BYTES


if __name__ == "__main__":
    main()
