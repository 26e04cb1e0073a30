"""The shape of Trainer (Transformers 5.23 and 5.24) that `HoldfastMixin` meets: its methods, in the order of its calls.

`tests/integrations/transformers/test_shapes.py` compares it with the real one. It trains for real, on one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class RecordedState:
    """`TrainerState`, with the fields that are read or set."""

    global_step: int = 0
    max_steps: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecordedArguments:
    """`TrainingArguments`, with the fields that are read or set."""

    output_dir: str
    max_steps: int = 4
    save_steps: int = 2
    save_total_limit: int | None = None
    save_only_model: bool = False
    save_on_each_node: bool = False
    load_best_model_at_end: bool = False
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    push_to_hub: bool = False
    hub_strategy: str = "every_save"

    def to_json_string(self) -> str:
        return json.dumps(asdict(self))


class RecordedControl:
    """`TrainerControl`: what it keeps of itself."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RecordedControl:
        return cls()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}


class RecordedHandler:
    """`CallbackHandler`."""

    def __init__(self, callbacks: list[object]) -> None:
        self.callbacks = callbacks


class RecordedAccelerator:
    """`Accelerator`, without a scaler."""

    scaler: object | None = None

    def unwrap_model(self, model: object, keep_torch_compile: bool = True) -> object:
        return model


def fail_at_no_step(step: int) -> None:
    """Let every step go on."""


class RecordedTrainer:
    """`Trainer`, of which every method that the mixin replaces or calls does what the real one does around it."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: RecordedArguments | None = None,
        callbacks: list[object] | None = None,
        losses: Mapping[int, float] | None = None,
        on_step: Callable[[int], None] = fail_at_no_step,
    ) -> None:
        """Make one.

        Args:
            model: A linear layer with 4 inputs.
            args: The arguments.
            callbacks: Have a state, if their class has `from_state`.
            losses: By step, the loss of an evaluation before the step is saved.
            on_step: Called after each step, before it is saved.
        """
        assert args is not None, "a recorded trainer has arguments"
        self.args = args
        self.model = torch.nn.Linear(4, 2) if model is None else model
        self.callback_handler = RecordedHandler(list(callbacks or ()))
        self.control, self.state = RecordedControl(), RecordedState()
        self.accelerator, self.processing_class, self.data_collator = RecordedAccelerator(), None, None
        self.is_deepspeed_enabled, self.hp_search_backend = False, None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.losses, self.on_step = losses or {}, on_step
        self.own_calls: list[str] = []
        """The methods of Trainer that ran although the mixin replaces them."""
        self.pushed: list[tuple[str, int, list[str]]] = []

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> str:
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
            json.loads(Path(resume_from_checkpoint, "trainer_state.json").read_text())
        return self._inner_training_loop(
            2, args=self.args, resume_from_checkpoint=resume_from_checkpoint, trial=trial, ignore_keys_for_eval=None
        )

    def _inner_training_loop(
        self,
        batch_size: Any = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> str:
        self._init_training_state(self.args.max_steps, 1, 1, resume_from_checkpoint, trial)
        self._prepare_for_training(self.args.max_steps, None, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._load_rng_state(resume_from_checkpoint)
        while self.state.global_step < self.args.max_steps:
            self.train_one_step()
        return self._finalize_training(trial, 1, 0.0)

    def _init_training_state(
        self,
        max_steps: Any,
        num_update_steps_per_epoch: Any,
        num_train_epochs: Any,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        self.state = RecordedState()
        if resume_from_checkpoint is not None:
            text = Path(resume_from_checkpoint, "trainer_state.json").read_text()
            self.state = RecordedState(**json.loads(text))
        return 0, 0

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)

    def train_one_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.lr_scheduler.step()
        self.state.global_step += 1
        step = self.state.global_step
        self.on_step(step)
        if step in self.losses:
            loss = self.losses[step]
            self.state.log_history.append({"eval_loss": loss, "eval_runtime": 0.5, "step": step})
            if self.state.best_metric is None or loss < self.state.best_metric:
                self.state.best_metric, self.state.best_global_step = loss, step
        if step % self.args.save_steps == 0:
            self._save_checkpoint(self.model, None)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> str:
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        if self.args.save_total_limit == 1 and self.state.best_model_checkpoint is not None:
            self.own_calls.append("removed older folders")
        return "trained"

    def _get_output_dir(self, trial: Any) -> str:
        return self.args.output_dir

    def store_flos(self) -> None:
        """Count nothing."""

    def is_world_process_zero(self) -> bool:
        return True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.own_calls.append("_save_checkpoint")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.own_calls.append("_load_from_checkpoint")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.own_calls.append("_load_optimizer_and_scheduler")

    def _load_scaler(self, checkpoint: str | None) -> None:
        self.own_calls.append("_load_scaler")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self.own_calls.append("_load_rng_state")

    def _load_best_model(self) -> None:
        self.own_calls.append("_load_best_model")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.pushed.append((checkpoint_folder, self.state.global_step, sorted(os.listdir(checkpoint_folder))))
