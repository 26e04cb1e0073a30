"""Train with FSDP2 and save by DCP's verbs, as checkpoints of Holdfast; kill it and start it again.

torchrun --nproc-per-node 2 examples/dcp_save.py out     # and again with 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gpt import GPT, batch_of, text_of
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast.integrations import dcp  # was: import torch.distributed.checkpoint as dcp

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, nargs="?", default="out")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--every", type=int, default=5)
arguments = parser.parse_args()

distributed.init_process_group("gloo")
saves = distributed.new_group()  # On CPUs: a save in the background must not mix its collectives with training's.
rank = distributed.get_rank()
torch.manual_seed(0)
model = GPT()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = text_of(__file__)
first, saving = 1, None
# A step is there once its manifest is: a save that was cut off is not among these.
saved = sorted(path.parent for path in arguments.folder.glob("*/manifest.json"))
if saved:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load(state := {"model": model_state, "optimizer": optimizer_state, "step": 0}, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = state["step"] + 1

for step in range(first, arguments.steps + 1):
    torch.manual_seed(1000 * step + rank)
    loss = model(*batch_of(text, 8))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item()!r}", flush=True)
    if step % arguments.every == 0:
        if saving is not None:
            saving.result()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        saving = dcp.async_save(state, checkpoint_id=arguments.folder / f"{step:06d}", process_group=saves)

if saving is not None:
    saving.result()
distributed.destroy_process_group()
