"""Train a small GPT in one process, or under DDP, with gradient accumulation; kill it and start it again.

    python examples/train.py out
    torchrun --nproc-per-node 2 examples/train.py out

The second start of a command goes on where the last committed save was; with `--differential`, at the last step. With
`--near /local/nvme/out` every second step is saved there, and each step that is due in `out` is copied behind training.
"""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import nullcontext

import gpt
import torch
from gpt import GPT, batch_of, text_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--text", default=gpt.__file__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--differential", action="store_true")
parser.add_argument("--near", help="a fast local folder before the root")
arguments = parser.parse_args()

logging.basicConfig(level=logging.INFO, format="%(message)s")
is_distributed = "RANK" in os.environ
if is_distributed:
    distributed.init_process_group("gloo")
rank = distributed.get_rank() if is_distributed else 0

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
replica = DistributedDataParallel(model) if is_distributed else model
torch.manual_seed(1000 + rank)
text = text_of(arguments.text)

near = None if arguments.near is None else holdfast.Tier(arguments.near, every=2)
manager = holdfast.CheckpointManager(
    arguments.folder, every=arguments.every, keep_last=3, near=near, differential=arguments.differential
)
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": holdfast.RngState()}
first = (manager.load(state) or 0) + 1

for step in range(first, arguments.steps + 1):
    loss = 0.0
    for part in range(arguments.accumulate):
        is_last = part == arguments.accumulate - 1
        with nullcontext() if is_last or not is_distributed else replica.no_sync():
            part_loss = replica(*batch_of(text, 8)) / arguments.accumulate
            part_loss.backward()
        loss += part_loss.item()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if rank == 0:
        print(f"step {step} loss {loss!r}", flush=True)
    manager.maybe_save(step, state, metrics={"loss": loss})

manager.close()
if is_distributed:
    distributed.destroy_process_group()
