"""Lightning's Trainer with checkpoints of Holdfast. Run it, kill it at any moment, run it again.

    python examples/lightning_fit.py                                        one process
    python examples/lightning_fit.py 2                                      FSDP2 on two CPUs

A checkpoint is saved while training goes on. The best and the last are kept, and the last one resumes.
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

from holdfast.integrations.lightning import HoldfastCheckpointIO, HoldfastModelParallelStrategy

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else 1


class Model(lightning.LightningModule):
    """Learns to add numbers."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def configure_model(self):
        """Shard the layers."""
        if RANKS > 1:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, number):
        """Return the loss of a batch."""
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=RANKS > 1)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if RANKS > 1:
    keeping = {"strategy": HoldfastModelParallelStrategy(RANKS, 1, background=True)}
else:
    keeping = {"plugins": [HoldfastCheckpointIO(background=True)]}

trainer = lightning.Trainer(
    accelerator="cpu",
    devices=RANKS,
    max_epochs=4,
    callbacks=[ModelCheckpoint("lightning-run", monitor="loss", save_top_k=2, save_last=True)],
    logger=False,
    **keeping,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(256, 32), batch_size=16), ckpt_path="last")
print(f"ends at step {trainer.global_step}")
