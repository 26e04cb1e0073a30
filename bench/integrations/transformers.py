"""Trainer's own checkpoint, the same through `HoldfastMixin`, and Holdfast's own verbs with the same state.

`ours` is what a training does: it copies the state, and writes behind training. Its like is a `CheckpointManager` that
does the same (`behind`). `holdfast.save` waits and copies nothing; its like is `background=False` (`ours_awaited`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import holdfast
from bench.integrations.common import seconds, state_bytes, sync_tree
from holdfast.integrations.transformers import HoldfastMixin

KEYS = {
    "trainer_save": ("own", "ours"),
    "integration_overhead": ("ours_awaited", "plain"),
    "integration_overhead_background": ("ours", "behind"),
    "background_until_committed": ("ours", "plain"),
}


class HoldfastTrainer(HoldfastMixin, Trainer):
    """The change that a user makes."""


def round(place: Path, number: int) -> dict[str, float]:
    """Return the seconds of this rank, by name. Each round begins with another of the five."""
    times: dict[str, float] = {}
    saves = [_own, _ours, _plain, _ours_awaited, _behind]
    for save in saves[number % 5 :] + saves[: number % 5]:
        folder = place / f"{number}{save.__name__}"
        save(folder, times)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    return times


def _own(folder: Path, times: dict[str, float]) -> None:
    own, _ = _trainers()
    own.args.output_dir = str(folder)
    times["own_unsynced"] = _seconds(lambda: own._save_checkpoint(own.model, None))
    is_writer = dist.get_rank() == 0
    times["own"] = times["own_unsynced"] + (seconds(lambda: sync_tree(folder)) if is_writer else 0.0)


def _ours(folder: Path, times: dict[str, float]) -> None:
    times["ours"] = _through_the_mixin(folder, background=True)


def _ours_awaited(folder: Path, times: dict[str, float]) -> None:
    times["ours_awaited"] = _through_the_mixin(folder, background=False)


def _through_the_mixin(folder: Path, *, background: bool) -> float:
    _, ours = _trainers()
    ours.args.output_dir = str(folder)
    ours._holdfast_options = replace(ours._holdfast_options, background=background)
    with ours._opened_run(None) as run:

        def save() -> None:
            ours._save_checkpoint(ours.model, None)
            run.settle()

        return _second(save)


def _behind(folder: Path, times: dict[str, float]) -> None:
    _, ours = _trainers()
    with holdfast.CheckpointManager(folder, preemption=False) as manager:

        def save() -> None:
            manager.save(ours.state.global_step, _objects())
            manager.wait()

        times["behind"] = _second(save)


def _second(save: Callable[[], None]) -> float:
    """Return the seconds of the second save of a run: the first makes the run and its plan. Between, all changes."""
    _, ours = _trainers()
    save()
    with torch.no_grad():
        for parameter in ours.model.parameters():
            for tensor in (parameter, *_moments(ours.optimizer, parameter)):
                tensor.add_(1e-3)
    ours.state.global_step += 1
    return _seconds(save)


def _moments(optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.optimizer.state[parameter]
    return [state["exp_avg"], state["exp_avg_sq"]]


def _plain(folder: Path, times: dict[str, float]) -> None:
    times["plain"] = _seconds(lambda: holdfast.save(folder, _objects()))


def _objects() -> dict[str, object]:
    """What the mixin saves beside Trainer's own record."""
    _, ours = _trainers()
    objects = {"model": ours.model, "optimizer": ours.optimizer, "scheduler": ours.lr_scheduler}
    return {**objects, "rng": holdfast.RngState()}


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    return seconds(call)


@cache
def _trainers() -> tuple[Any, Any]:
    """Return a trainer of each kind over one model and one optimizer, after a step."""
    # With the moments of AdamW three times the parameters: 22 million for 256 MiB, in the shape of a small Llama.
    hidden = 512 if state_bytes() > 64 << 20 else 128
    config = LlamaConfig(
        vocab_size=2 * hidden,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=5,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    row = torch.arange(8)
    options: dict[str, Any] = {
        "args": TrainingArguments(
            "unused",
            max_steps=1,
            save_strategy="no",
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        ),
        "train_dataset": [{"input_ids": row, "labels": row}] * 4,
    }
    own = Trainer(model, **options)
    own.train()
    ours = HoldfastTrainer(model, **options)
    for name in ("optimizer", "lr_scheduler", "state"):
        setattr(ours, name, getattr(own, name))
    return own, ours
