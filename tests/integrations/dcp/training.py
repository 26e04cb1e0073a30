"""A small FSDP2 training that saves and resumes by DCP's verbs, with either storage below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.integrations import dcp
from tests.integrations.run import Run

BATCH = 6
"""Examples of a step, over all ranks: one, two and three ranks divide it."""


class Training:
    """Model, optimizer and step: one object for DCP, as its tutorial has it."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
        fully_shard(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def train_step(self) -> float:
        """Make one step; return its loss over all ranks."""
        self.step += 1
        random = torch.Generator().manual_seed(self.step)
        inputs, labels = torch.randn(BATCH, 8, generator=random), torch.randn(BATCH, 4, generator=random)
        own = slice(dist.get_rank(), None, dist.get_world_size())
        self.optimizer.zero_grad()
        loss = (self.net(inputs[own]) - labels[own]).square().mean()
        loss.backward()
        self.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        return float(mean)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors, whole."""
        found: dict[str, torch.Tensor] = {}

        def add(value: object, name: str) -> None:
            if isinstance(value, dict):
                for key, item in value.items():
                    add(item, f"{name}.{key}" if name else key)
            elif isinstance(value, torch.Tensor):
                found[name] = value.full_tensor() if isinstance(value, DTensor) else value

        add(self.state_dict(), "")
        return found


def train(run: Run) -> None:
    """Train on this rank."""
    dist.init_process_group("gloo")
    # On CPUs, training and a save in the background would mix their collectives in one group.
    saving_group = dist.new_group(backend="gloo")
    verbs: Any = dcp if run.keeper == "holdfast" else torch_dcp
    training = Training()
    resumed_from = None
    if run.resume:
        path = _newest(run.folder, _is_whole if run.keeper == "holdfast" else _has_metadata)
        if path is not None:
            verbs.load({"training": training}, checkpoint_id=path)
            resumed_from = training.step
    losses, saving = [], None
    while training.step < run.steps:
        losses.append(training.train_step())
        if training.step % run.every == 0:
            if saving is not None:
                saving.result()
            path = run.folder / f"step-{training.step:06d}"
            saving = verbs.async_save({"training": training}, checkpoint_id=path, process_group=saving_group)
    if saving is not None:
        saving.result()
    run.finish(resumed_from=resumed_from, tensors=training.tensors(), losses=losses)
    dist.barrier()
    dist.destroy_process_group()


def _newest(folder: Path, is_whole: Callable[[Path], bool]) -> Path | None:
    """Return the newest checkpoint, as rank 0 sees it."""
    found = [None]
    if dist.get_rank() == 0:
        found = [next((path for path in sorted(folder.glob("step-*"), reverse=True) if is_whole(path)), None)]
    dist.broadcast_object_list(found)
    return found[0]


def _is_whole(path: Path) -> bool:
    try:
        holdfast.open_checkpoint(path)
    except holdfast.MissingError:
        return False
    return True


def _has_metadata(path: Path) -> bool:
    return (path / ".metadata").exists()
