"""A small Llama that Trainer trains on each rank, with our keeper or with Trainer's own checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import holdfast
from holdfast.integrations.transformers import HoldfastMixin
from tests.integrations.run import Run

EXAMPLES = 96
"""So many that no training of the rig comes to the end of the first epoch."""


class HoldfastTrainer(HoldfastMixin, Trainer):
    """The change that a user makes."""


class Trained(Exception):
    """The training resumed at the step where it ends: Trainer itself would train one more."""


class Watch(TrainerCallback):
    """Notes the step that was resumed and the losses, and ends a training that is over."""

    def __init__(self, steps: int) -> None:
        self.steps, self.resumed_from = steps, None
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.resumed_from = state.global_step or None
        if state.global_step >= self.steps:
            raise Trained

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def small_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    )


def examples() -> list[dict[str, torch.Tensor]]:
    rows = [(torch.arange(16) * 3 + number) % 64 for number in range(EXAMPLES)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, *, steps: int, every: int, **others: Any) -> TrainingArguments:
    known = {
        "max_steps": steps,
        "save_steps": every,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        # The rate must not depend on where the training ends: the rig compares trainings of several lengths.
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **(known | others))


def whole_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters and the state of the optimizer, by name, gathered where they are sharded."""
    named = dict(model.named_parameters())
    tensors = {f"model.{name}": parameter for name, parameter in named.items()}
    state = getattr(optimizer, "optimizer", optimizer).state
    for name, parameter in named.items():
        for key, value in state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return {name: _whole(tensor).detach().cpu() for name, tensor in tensors.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(run: Run, **options: Any) -> None:
    kind = HoldfastTrainer if run.keeper == "holdfast" else Trainer
    watch = Watch(run.steps)
    trainer = kind(
        small_llama(),
        arguments(run.folder, steps=run.steps, every=run.every, **options),
        train_dataset=examples(),
        callbacks=[watch],
    )
    try:
        trainer.train(resume_from_checkpoint=_source(run))
    except Trained:
        pass
    tensors = whole_tensors(trainer.model, trainer.optimizer)
    run.finish(resumed_from=watch.resumed_from, tensors=tensors, losses=watch.losses)


def _source(run: Run) -> bool:
    """Return what a script that may be started again passes: whether there is something to resume."""
    if not run.resume:
        return False
    if run.keeper == "own":
        return any(name.startswith("checkpoint-") for name in os.listdir(run.folder))
    try:
        return bool(holdfast.api.list_steps(run.folder / "_holdfast").steps)
    except holdfast.MissingError:
        return False
