"""Saves under Lightning: its own checkpoints, ours, and `holdfast.save` of the same state.

Trainer and Fabric save the very same model and optimizer, under FSDP2. Under DDP rank 0 saves for all, once.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import holdfast
from bench.integrations.common import seconds, state_bytes, sync_tree
from holdfast.integrations.lightning import (
    HoldfastCheckpointIO,
    HoldfastFabricModelParallelStrategy,
    HoldfastModelParallelStrategy,
)

KEYS = {
    "lightning_save": ("own", "ours"),
    "fabric_save": ("fabric_own", "fabric_ours"),
    "lightning_ddp_save": ("ddp_own", "ddp_ours"),
    "integration_overhead": ("ours", "plain"),
}

WIDTH = 1024
BYTES_PER_PARAMETER = 12
"""Of a parameter in 32 bits and its two moments."""


class _Model(lightning.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def configure_model(self) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@dataclass(frozen=True)
class _Job:
    """What is saved, and who saves it."""

    trainer: Any
    own: ModelParallelStrategy
    ours: HoldfastModelParallelStrategy
    fabrics: dict[str, Any]
    state: dict[str, Any]
    """Of Fabric."""

    checkpoint: dict[str, Any]
    """Of DDP, on rank 0: as much as a rank has under FSDP2."""


@cache
def _job() -> _Job:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = int(os.environ["WORLD_SIZE"])
    layers = max(1, state_bytes() // (BYTES_PER_PARAMETER * WIDTH**2))
    model, ours = _Model(ranks * layers), HoldfastModelParallelStrategy(ranks, 1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ours,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2 * ranks, WIDTH)))
    own = ModelParallelStrategy(ranks, 1)
    # Both save the very same objects.
    vars(own).update({name: value for name, value in vars(ours).items() if name in vars(own)})
    fabrics = {}
    for name, strategy in (
        ("fabric_own", FabricModelParallelStrategy(_kept, ranks, 1)),
        ("fabric_ours", HoldfastFabricModelParallelStrategy(_kept, ranks, 1)),
    ):
        fabrics[name] = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        fabrics[name].launch()
    state = {"model": model, "optimizer": trainer.optimizers[0], "step": 1}
    return _Job(trainer, own, ours, fabrics, state, _checkpoint_of_ddp(layers) if dist.get_rank() == 0 else {})


def _kept(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    return model


def _checkpoint_of_ddp(layers: int) -> dict[str, Any]:
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    return {"global_step": 1, "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def round(place: Path, number: int) -> dict[str, float]:
    """Return the seconds of one round on this rank; the order differs from round to round."""
    job = _job()
    saves: dict[str, Callable[[Path], object]] = {
        "own": lambda folder: _save_by(job, job.own, folder),
        "ours": lambda folder: _save_by(job, job.ours, folder),
        "plain": lambda folder: holdfast.save(folder, _state(job)),
        "fabric_own": lambda folder: job.fabrics["fabric_own"].save(folder, job.state),
        "fabric_ours": lambda folder: job.fabrics["fabric_ours"].save(folder, job.state),
        "ddp_own": lambda folder: _save_under_ddp(job, TorchCheckpointIO(), folder),
        "ddp_ours": lambda folder: _save_under_ddp(job, HoldfastCheckpointIO(), folder),
    }
    times: dict[str, float] = {}
    for name in random.Random(number).sample(list(saves), len(saves)):
        folder = place / f"{name}-{number}.ckpt"
        dist.barrier()
        times[name] = seconds(lambda name=name, folder=folder: saves[name](folder))  # type: ignore[misc]
        dist.barrier()
        if name.endswith("own"):
            times[f"{name}_unsynced"] = times[name]
            times[name] += seconds(lambda folder=folder: _make_durable(folder))  # type: ignore[misc]
        if dist.get_rank() == 0:
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    return times


def _save_by(job: _Job, strategy: Any, path: Path) -> None:
    job.trainer._accelerator_connector.strategy = strategy
    job.trainer.save_checkpoint(path)


def _save_under_ddp(job: _Job, keeper: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        keeper.save_checkpoint(job.checkpoint, str(path))
    dist.barrier()


def _make_durable(path: Path) -> None:
    """One rank makes the files of both durable: they are on one machine."""
    if dist.get_rank() == 0:
        if path.is_dir():
            sync_tree(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sync = os.open(path.parent, os.O_RDONLY)
            os.fsync(sync)
            os.close(sync)
    dist.barrier()


def _state(job: _Job) -> dict[str, object]:
    """What `ours` saves, without Lightning."""
    checkpoint = job.trainer._checkpoint_connector.dump_checkpoint(False)
    objects = {"state_dict": job.ours.model, "optimizer_states": [job.state["optimizer"]]}
    return {**checkpoint, **objects} if dist.get_rank() == 0 else dict(objects)
