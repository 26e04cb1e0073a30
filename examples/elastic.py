"""Train a small GPT with FSDP2 on one to four ranks that may be lost and come back; no sample is lost or doubled.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    elastic="torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d"
    elastic="$elastic --rdzv-endpoint localhost:29400 --rdzv-conf last_call_timeout=5,keep_alive_interval=2"
    for rank in 1 2 3 4; do $elastic examples/elastic.py out & done

Kill a rank, or a torchrun with its rank, but not the torchrun that began first: the others connect to it. Start a
torchrun again. docs/elastic.md has times and limits. A job that starts anew may take another number of ranks:

    torchrun --nproc-per-node 2 examples/elastic.py out
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from datetime import timedelta
from pathlib import Path

import torch
from gpt import CONTEXT, GPT, text_of
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--text", default=__file__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--keep-last", type=int, default=3)
parser.add_argument("--step-seconds", type=float, default=0.0, help="least time of a step, as of a larger model")
parser.add_argument("--trained", help="folder for a line about each step of each rank")
arguments = parser.parse_args()


class Windows:
    """Samples of a text: every eighth place, with the text from there on."""

    def __init__(self, text: Tensor) -> None:
        """Take the bytes of a text."""
        self.text = text

    def __len__(self) -> int:
        """Return the number of samples."""
        return (len(self.text) - CONTEXT - 1) // 8

    def __getitem__(self, sample: int) -> tuple[int, Tensor, Tensor]:
        """Return the number of the sample, its tokens, and the token that follows each."""
        window = self.text[8 * sample : 8 * sample + CONTEXT + 1]
        return sample, window[:-1], window[1:]


logging.basicConfig(level=logging.INFO, format="%(message)s")
# A collective fails after this time if a rank has stopped without an end of its connection.
distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, ranks = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1000 + rank)

# 24 samples a step on any number of ranks, so the learning rate stays right.
loader = holdfast.data.Loader(Windows(text_of(arguments.text)), global_batch=24, micro_batch=8, seed=7)
manager = holdfast.CheckpointManager(arguments.folder, every=arguments.every, keep_last=arguments.keep_last)
state = {"model": model, "optimizer": optimizer, "data": loader, "rng": holdfast.RngState()}
resumed = manager.load(state) or 0
trained = None
if arguments.trained:
    Path(arguments.trained).mkdir(parents=True, exist_ok=True)
    trained = (Path(arguments.trained) / f"rank-{rank}.jsonl").open("a", buffering=1)

for step in loader.steps(epochs=arguments.epochs):
    began, samples = time.time(), []
    for (numbers, tokens, targets), weight in step:
        (model(tokens, targets) * weight).backward()
        # A last step of fewer samples than ranks gives some ranks a sample of weight 0, which another rank has too.
        samples += numbers.tolist() if weight else []
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(max(0.0, began + arguments.step_seconds - time.time()))
    if trained:
        line = {"step": step.number, "epoch": step.epoch, "samples": samples, "ranks": ranks, "resumed": resumed}
        print(json.dumps({**line, "time": time.time()}), file=trained)
    manager.maybe_save(step.number, state)

manager.close()
distributed.destroy_process_group()
