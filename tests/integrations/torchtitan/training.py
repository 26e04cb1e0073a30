"""A short training of torchtitan's Llama 3 debug model, saved by Holdfast or by torchtitan's own manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integrations.run import Run

if TYPE_CHECKING:
    import torch
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.trainer import Trainer


def train(run: Run) -> None:
    """Train one rank until the last step of the run. A start resumes from what the folder holds, by itself."""
    from torch import distributed

    from tests.integrations.torchtitan.on_cpu import config_of

    trainer = config_of(str(run.folder), run.steps, checkpoint_of(run)).build()
    losses = losses_of(trainer)
    trainer.train()
    trainer.close()
    resumed_from = run.steps - len(losses)
    run.finish(resumed_from=resumed_from or None, tensors=whole_tensors(trainer), losses=losses)
    distributed.destroy_process_group()


def checkpoint_of(run: Run) -> BaseCheckpointManager.Config:
    """Return what a user writes into `config.checkpoint`."""
    from torchtitan.components.checkpointer import CheckpointManager

    from holdfast.integrations.torchtitan import HoldfastManager

    if run.keeper == "own":
        return CheckpointManager.Config(
            enable=True, interval=run.every, last_save_model_only=False, keep_latest_k=0, async_mode="async"
        )
    return HoldfastManager.Config(enable=True, interval=run.every, last_save_model_only=False, keep_latest_k=0)


def losses_of(trainer: Trainer) -> list[float]:
    """Return a list that gets the loss of each step, as torchtitan logs it."""
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def noting(step: int, global_avg_loss: float, *rest: object, **options: object) -> None:
        losses.append(global_avg_loss)
        log(step, global_avg_loss, *rest, **options)

    trainer.metrics_processor.log = noting
    return losses


def whole_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all tensors of model and optimizers by name, whole, on every rank."""
    from torch.distributed.tensor import DTensor

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    named = {name: each for part in trainer.model_parts for name, each in part.named_parameters()}
    tensors = {f"model.{name}": whole(each) for name, each in named.items()}
    states = {each: state for optimizer in trainer.optimizers for each, state in optimizer.state.items()}
    for name, parameter in named.items():
        for key, value in states.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = whole(value)
    return tensors
