"""A training under Accelerate: FSDP2, or DDP, with all that `save_state` keeps, saved as the docs of Accelerate show.

Data depend on step and process alone, so a resumed training sees what the uninterrupted one saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import accelerate
import torch
from accelerate.utils import ProjectConfiguration
from torch.distributed.tensor import DTensor

from holdfast.errors import MissingError
from tests.integrations.accelerate.on_cpu import shard, sharding_plugin
from tests.integrations.run import Run

BATCH, WIDTH = 4, 16


class Progress:
    """Counts optimizer steps; an object of the script, registered for checkpointing."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step = state["step"]


def train(run: Run) -> None:
    """Train with FSDP2."""
    _train(run, is_sharded=True)


def train_replicas(run: Run) -> None:
    """Train with DDP."""
    _train(run, is_sharded=False)


def _train(run: Run, *, is_sharded: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = made(run, is_sharded=is_sharded)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(next(model.parameters()), DTensor) is is_sharded
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    resumed_from = resume(accelerator, progress, run) if run.resume else None
    losses = []
    while progress.step < run.steps:
        progress.step += 1
        torch.manual_seed(1000 * progress.step + accelerator.process_index)
        loss = (model(torch.randn(BATCH, WIDTH)) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if progress.step % run.every == 0:
            accelerator.save_state()
    accelerator.wait_for_everyone()
    run.finish(resumed_from=resumed_from, tensors=dict(whole_tensors(model, optimizer)), losses=losses)
    accelerator.end_training()


def made(run: Run, *, is_sharded: bool) -> accelerate.Accelerator:
    """Return Holdfast's Accelerator, or Accelerate's own."""
    if run.keeper == "holdfast":
        from holdfast.integrations.accelerate import Accelerator
    else:
        from accelerate import Accelerator
    configuration = ProjectConfiguration(
        project_dir=str(run.folder), automatic_checkpoint_naming=True, total_limit=None if run.keeper == "own" else 3
    )
    plugin = sharding_plugin("Linear") if is_sharded else None
    accelerator: accelerate.Accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=configuration)
    if plugin is not None:
        shard(accelerator, plugin)
    return accelerator


def resume(accelerator: accelerate.Accelerator, progress: Progress, run: Run) -> int | None:
    """Load the newest checkpoint as the docs of Accelerate say; return its step, None if there is none yet."""
    if run.keeper == "own":
        if not list(run.folder.glob("checkpoints/*")):
            return None
        accelerator.load_state()
        # Accelerate leaves it at 0, and its next save would meet a folder that exists.
        accelerator.project_configuration.iteration = progress.step // run.every
        return progress.step
    try:
        accelerator.load_state()
    except MissingError:
        return None
    return progress.step


def whole_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a model and its optimizer, whole. A collective of sharded ones."""
    for name, parameter in accelerate.utils.extract_model_from_parallel(model).named_parameters():
        yield name, whole(parameter)
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", whole(value)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return (plain.full_tensor() if isinstance(plain, DTensor) else plain).cpu()
