"""A loop under Fabric with checkpoints of Holdfast. Run it, kill it at any moment, run it again.

python examples/lightning_fabric.py                                    one process
python examples/lightning_fabric.py 2                                       DDP on two CPUs
"""

import sys
from pathlib import Path

import lightning
import torch

from holdfast.integrations.lightning import HoldfastCheckpointIO

RANKS, STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1, 200
RUN = Path("fabric-run")


def newest():
    """Return the newest checkpoint: only whole ones have a name here."""
    return max(RUN.glob("step-*.ckpt"), key=lambda path: int(path.stem.partition("-")[2]), default=None)


keeper = HoldfastCheckpointIO(background=True)
fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", plugins=[keeper])
fabric.launch()
fabric.seed_everything(0)

network = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=0.01))
state = {"model": model, "optimizer": optimizer, "step": 0}

found = fabric.broadcast(newest())
if found is not None:
    fabric.load(found, state)
    fabric.print(f"goes on at step {state['step']}")

for step in range(state["step"] + 1, STEPS + 1):
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * RANKS + fabric.global_rank))
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    state["step"] = step
    if step % 50 == 0:
        fabric.save(RUN / f"step-{step}.ckpt", state)

keeper.wait()  # Fabric ends nothing by itself
fabric.print(f"ends at step {state['step']}")
