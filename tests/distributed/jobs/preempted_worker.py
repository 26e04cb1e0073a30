"""A rank that trains until it is done or told to end, and leaves behind what it had and how it left."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from tests.support.forked_processes import write_whole

EVERY = 40
"""Steps from one save to the next."""


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of every bit of what is trained."""
    found = hashlib.sha256()
    moments = optimizer.state_dict()["state"]
    named = {f"{number}.{name}": tensor for number, each in moments.items() for name, tensor in each.items()}
    named |= model.state_dict()
    for _, tensor in sorted(named.items()):
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def joined(scratch: Path, rank: int, world_size: int) -> None:
    """Join the ranks: through torchrun's agent where there is one, else through a store that rank 0 hosts."""
    timeout = timedelta(seconds=60)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
        return
    port = scratch / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        write_whole(port, str(store.port))
    else:
        while not port.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def main(*arguments: str) -> None:
    """Train with what `preempting.training` says."""
    root, scratch, grace_seconds, steps = Path(arguments[0]), Path(arguments[1]), float(arguments[2]), int(arguments[3])
    looked_at = {int(each) for each in arguments[4].split(",") if each}
    torch.set_num_threads(1)
    torch.manual_seed(7)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    joined(scratch, rank, world_size)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    preemption = holdfast.Preemption(grace_seconds=grace_seconds)
    seen = {}
    with holdfast.CheckpointManager(root, every=EVERY, preemption=preemption) as manager:
        state = {"model": model, "optimizer": optimizer}
        resumed = manager.load(state)
        said = {"resumed": resumed, "digest": digest_of(model, optimizer)}
        for step in range((resumed or 0) + 1, steps + 1):
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * world_size + rank))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, 1)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if step in looked_at:
                seen[step] = digest_of(model, optimizer)
            try:
                manager.maybe_save(step, state)
            except holdfast.Preempted as preempted:
                said |= {"code": preempted.code, "step": preempted.step, "why": preempted.why}
                said["left"] = digest_of(model, optimizer)
                write_whole(scratch / f"end.{rank}.json", json.dumps(said))
                raise
            if step == (resumed or 0) + 1:
                write_whole(scratch / f"begun.{rank}", "")
    if rank == 0:
        write_whole(scratch / "seen.json", json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
