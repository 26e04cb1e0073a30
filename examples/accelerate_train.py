"""Train under Accelerate with Holdfast's checkpoints; kill it and start it again.

    python examples/accelerate_train.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_train.py

The second start goes on where the last committed save was.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

from holdfast.errors import MissingError
from holdfast.integrations.accelerate import Accelerator  # instead of: from accelerate import Accelerator

EPOCHS, EVERY = 4, 5

folders = ProjectConfiguration(project_dir="accelerate-out", automatic_checkpoint_naming=True, total_limit=3)
order = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of an epoch depends on its number alone
accelerator = Accelerator(cpu=True, project_config=folders, dataloader_config=order)
set_seed(0)
examples = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
loader = torch.utils.data.DataLoader(examples, batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
# The number of a checkpoint does not say how far the training was: a damaged one is passed over.
progress = torch.nn.Module()
progress.register_buffer("step", torch.tensor(0))
accelerator.register_for_checkpointing(progress)
with suppress(MissingError):  # A new training has no checkpoint yet.
    accelerator.load_state()

step = int(progress.step)
for epoch in range(step // len(loader), EPOCHS):
    loader.set_epoch(epoch)
    for batch, target in accelerator.skip_first_batches(loader, step - epoch * len(loader)):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            progress.step.fill_(step)
            accelerator.save_state()
    accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
accelerator.end_training()
