"""Train a small GPT with FSDP2; kill it and start it again, on another number of ranks if you like.

torchrun --nproc-per-node 2 examples/train_fsdp2.py out
torchrun --nproc-per-node 3 examples/train_fsdp2.py out

With `--near /dev/shm/run-7` each second step is saved in memory. If the job is killed and does not come back within 20
seconds, a process of its own brings the newest step to `out`.
"""

from __future__ import annotations

import argparse
import logging

import gpt
import torch
from gpt import GPT, Windows, text_of
from torch import distributed
from torch.distributed.fsdp import fully_shard

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--text", default=gpt.__file__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--near", help="a fast folder of this host before the root, such as /dev/shm/run-7")
arguments = parser.parse_args()

logging.basicConfig(level=logging.INFO, format="%(message)s")
distributed.init_process_group("gloo")
rank = distributed.get_rank()

torch.manual_seed(0)
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = holdfast.data.Loader(Windows(text_of(arguments.text)), global_batch=16, micro_batch=8, seed=1)

near = None
if arguments.near is not None:
    near = holdfast.Tier(arguments.near, every=2, agent=True, orphan_seconds=20, linger_seconds=60)
manager = holdfast.CheckpointManager(arguments.folder, every=arguments.every, keep_last=3, near=near)
state = {"model": model, "optimizer": optimizer, "data": loader, "rng": holdfast.RngState()}
manager.load(state)

for step in loader.steps():
    if step.number > arguments.steps:
        break
    mean = torch.zeros(())
    for (tokens, targets), weight in step:
        loss = model(tokens, targets) * weight
        loss.backward()
        mean += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    distributed.all_reduce(mean, distributed.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step.number} loss {mean.item()!r}", flush=True)
    manager.maybe_save(step.number, state, metrics={"loss": mean})

manager.close()
distributed.destroy_process_group()
