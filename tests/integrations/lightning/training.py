"""A training under Lightning's Trainer, or under Fabric, that the rig kills and resumes.

`LIGHTNING_LAYOUT` chooses what is trained: `sharded` (FSDP2 under `ModelParallelStrategy`, the default), `fsdp1`,
`ddp`, `fabric` (FSDP2 under Fabric) or `fabric-ddp`. Under FSDP every rank saves; under DDP rank 0 saves for all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from holdfast.integrations.lightning import (
    HoldfastCheckpointIO,
    HoldfastFabricModelParallelStrategy,
    HoldfastFSDPStrategy,
    HoldfastModelParallelStrategy,
)
from tests.integrations.run import Run

WIDTH = 24
TOP_K = int(os.environ.get("LIGHTNING_TOP_K", "0"))
BACKGROUND = {"background": True} if os.environ.get("LIGHTNING_BACKGROUND") else {}


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))


def sharded(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def batch_of(step: int) -> torch.Tensor:
    rank = int(os.environ.get("RANK", "0"))
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


class Model(lightning.LightningModule):
    """Its data depends on step and rank alone, not on where a loader stands."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="layout")
        self.layout = layout
        self.layers = layers()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.layout == "sharded":
            sharded(self.layers, self.device_mesh)
        elif self.layout == "fsdp1":
            # Lightning would wrap it for a GPU.
            self.layers = FullyShardedDataParallel(self.layers, use_orig_params=True, device_id=torch.device("cpu"))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.layers(batch_of(self.trainer.global_step)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer_for(run: Run, layout: str) -> lightning.Trainer:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plugins: list[Any] = []
    if layout == "fsdp1":
        # Lightning refuses its own class without a GPU, and not this one.
        strategy: Any = HoldfastFSDPStrategy(**BACKGROUND)
    elif layout == "sharded":
        kind = HoldfastModelParallelStrategy if run.keeper == "holdfast" else ModelParallelStrategy
        strategy = kind(ranks, 1, **(BACKGROUND if run.keeper == "holdfast" else {}))
    else:
        strategy = DDPStrategy() if ranks > 1 else "auto"
        plugins = [HoldfastCheckpointIO(**BACKGROUND)] if run.keeper == "holdfast" else []
    # One save in a turn, which replaces the one before; with `LIGHTNING_TOP_K=1` another one that is removed later.
    saving = ModelCheckpoint(run.folder, every_n_train_steps=run.every, save_top_k=TOP_K, save_last=True)
    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        plugins=plugins,
        max_steps=run.steps,
        callbacks=[saving],
        default_root_dir=run.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def whole_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer, gathered on every rank."""
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model.{name}": tensor.cpu() for name, tensor in weights.items()}
    for name, entries in state["state"].items():
        found |= {f"optimizer.{name}.{key}": torch.as_tensor(value).cpu() for key, value in entries.items()}
    return found


def train(run: Run) -> None:
    layout = os.environ.get("LIGHTNING_LAYOUT", "sharded")
    if layout.startswith("fabric"):
        train_with_fabric(run, is_sharded=layout == "fabric")
        return
    model = Model(layout)
    trainer = trainer_for(run, layout)
    loader = torch.utils.data.DataLoader(torch.zeros(10_000, 1), batch_size=1)
    trainer.fit(model, loader, ckpt_path="last" if run.resume else None, weights_only=False)
    first = trainer.global_step - len(model.losses)
    run.finish(
        resumed_from=first or None,
        tensors=whole_tensors(trainer.strategy.model, trainer.optimizers[0]),
        losses=model.losses,
    )


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a Fabric training: the script names them, and removes none."""
    steps = {int(path.stem.partition("-")[2]): path for path in folder.glob("step-*.ckpt")}
    return steps[max(steps)] if steps else None


def train_with_fabric(run: Run, *, is_sharded: bool) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plugins: list[Any] = []
    strategy: Any = "ddp" if ranks > 1 else "auto"
    if is_sharded:
        kind = HoldfastFabricModelParallelStrategy if run.keeper == "holdfast" else FabricModelParallelStrategy
        strategy = kind(sharded, ranks, 1, **(BACKGROUND if run.keeper == "holdfast" else {}))
    elif run.keeper == "holdfast":
        plugins = [HoldfastCheckpointIO(**BACKGROUND)]
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=plugins)
    fabric.launch()
    if is_sharded:
        model = fabric.setup(layers())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    else:
        plain = layers()
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    found = fabric.broadcast(newest(run.folder) if run.resume else None)
    if found is not None:
        fabric.load(found, state, weights_only=False)
    first = state["step"]
    losses = []
    for step in range(first, run.steps):
        loss = model(batch_of(step)).square().mean()
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if state["step"] % run.every == 0:
            fabric.save(run.folder / f"step-{state['step']}.ckpt", state)
    for keeper in (fabric.strategy, *plugins):
        if hasattr(keeper, "wait"):
            keeper.wait()
    run.finish(
        resumed_from=first or None,
        tensors=whole_tensors(model.module, optimizer.optimizer),
        losses=losses,
    )
