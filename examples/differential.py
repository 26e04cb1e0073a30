"""Train a small network that may be killed at any step, and end with the digest of the run that was never killed.

    python examples/differential.py whole
    until python examples/differential.py killed --die; do :; done
    torchrun --nproc-per-node 2 examples/differential.py whole-2
    until torchrun --nproc-per-node 2 examples/differential.py killed-2 --die; do :; done

With `--die` each process kills itself with SIGKILL after a step that it draws, and the loop starts it again. Each start
goes on at the last step that every rank had recorded: the gradients of each step are stored in the run.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import signal
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=50)
parser.add_argument("--step-seconds", type=float, default=0.03)
parser.add_argument("--die", action="store_true")
arguments = parser.parse_args()

logging.basicConfig(level=logging.WARNING, format="%(message)s")
is_distributed = "RANK" in os.environ
if is_distributed:
    distributed.init_process_group("gloo")
rank = distributed.get_rank() if is_distributed else 0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
replica = DistributedDataParallel(model) if is_distributed else model
torch.manual_seed(1000 + rank)


def digest() -> str:
    """Return a digest of all parameters and their optimizer state."""
    found = hashlib.sha256()
    tensors = [*model.state_dict().values()]
    for kept in optimizer.state_dict()["state"].values():
        tensors += [kept[key] for key in sorted(kept)]
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": holdfast.RngState()}
with holdfast.CheckpointManager(arguments.folder, every=arguments.every, differential=True) as manager:
    first = (manager.load(state) or 0) + 1
    report = manager.load_report
    if rank == 0 and report is not None:
        print(f"goes on at step {first}: {report.redone_steps} steps were redone", flush=True)
    dies_after = first + random.SystemRandom().randint(10, 90) if arguments.die else None
    for step in range(first, arguments.steps + 1):
        inputs = torch.randn(32, 64)
        loss = (replica(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
        manager.maybe_save(step, state)
        time.sleep(arguments.step_seconds)  # Steps of a larger network take longer than a record needs.
        if step == dies_after:
            print(f"rank {rank} kills itself after step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

print(f"rank {rank} digest {digest()}", flush=True)
if is_distributed:
    distributed.destroy_process_group()
