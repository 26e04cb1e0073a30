"""Trains a small model under DDP with Holdfast alone, or with `torch.save` into one file."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.integrations.run import Run


def train(run: Run) -> None:
    """Train as the run says; see `Run`."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keeper = _Holdfast(run) if run.keeper == "holdfast" else _TorchSave(run)
    resumed_from = keeper.load(model, optimizer) if run.resume else None
    losses = []
    for step in range((resumed_from or 0) + 1, run.steps + 1):
        losses.append(_train_step(step, model, optimizer))
        if step % run.every == 0:
            keeper.save(step, model, optimizer)
    keeper.close()
    tensors = {f"model.{name}": tensor for name, tensor in model.module.state_dict().items()}
    for name, parameter in model.module.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = tensor
    run.finish(resumed_from=resumed_from, tensors=tensors, losses=losses)
    dist.destroy_process_group()
    if status := os.environ.get("PLAIN_EXIT_STATUS"):
        os._exit(int(status))  # A teardown that fails.


def _train_step(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    # The same data on any number of ranks, so that all of them train alike.
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


class _Holdfast:
    def __init__(self, run: Run) -> None:
        self._manager = holdfast.CheckpointManager(run.folder, preemption=False)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
        return self._manager.load({"model": model, "optimizer": optimizer})

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._manager.save(step, {"model": model, "optimizer": optimizer})

    def close(self) -> None:
        self._manager.close()


class _TorchSave:
    def __init__(self, run: Run) -> None:
        self._path = run.folder / "state.pt"

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int | None:
        if not self._path.exists():
            return None
        state = torch.load(self._path, weights_only=True)  # noqa: TID251 - this is the rival
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if os.environ["RANK"] == "0":
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, self._path)  # noqa: TID251 - this is the rival
        dist.barrier()

    def close(self) -> None:
        pass
