"""What torchtitan needs to train its Llama 3 debug model on CPUs with gloo. Nothing of its checkpointing is replaced.

It asks torch for an accelerator and takes CUDA if there is none, its attention has no backward on CPUs, gloo lacks one
reduction, and the wheel brings neither data nor tokenizer.

Import it before torchtitan: `python -m tests.integrations.torchtitan.on_cpu SCRIPT ARGUMENTS` does so for a script.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch._utils


def _stand_in_for_a_device() -> None:
    """Make the CPU the device that torchtitan finds, with what it asks a device for."""
    module_of = torch._utils._get_device_module

    def device_module(kind: str) -> ModuleType:
        return torch.cpu if kind == "cpu" else module_of(kind)  # type: ignore[no-any-return]

    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    torch._utils._get_device_module = device_module  # type: ignore[assignment]
    answers: dict[str, object] = {
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=16 << 30),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_allocated": 0,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, answer=answer, **__: answer)


_stand_in_for_a_device()

import torchtitan.distributed.utils
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common import attention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

WORDS = 2048
"""Words of the debug model."""


def _attend(query: Any, key: Any, value: Any, *, scale: float | None = None, enable_gqa: bool = False, **_: Any) -> Any:
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return out, None


attention.FlexAttention.compiled_flex_attn = staticmethod(_attend)
# It sets the timeout of the groups of a device, by a barrier that names the device by number.
torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None


class Words(BaseDataLoader):
    """Random words, the same for a batch number and a data-parallel rank, whatever came before."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: object) -> None:
        self.batch, self.dp_rank, self.shape = 0, dp_rank, (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        rows, length = self.shape
        positions = torch.arange(length - 1).repeat(rows, 1)
        while True:
            generator = torch.Generator().manual_seed(1_000 * self.batch + self.dp_rank)
            words = torch.randint(WORDS, self.shape, generator=generator)
            self.batch += 1
            yield {"input": words[:, :-1], "positions": positions}, words[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batch = state_dict["batch"]


class NoTokenizer(BaseTokenizer):
    """The data are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: object, **__: object) -> list[int]:
        return []

    def decode(self, *_: object, **__: object) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def config_of(folder: str, steps: int, checkpoint: BaseCheckpointManager.Config) -> Trainer.Config:
    """Return the config of a short training of the debug model.

    Args:
        folder: The dump folder.
        steps: Train until this step.
        checkpoint: The checkpoints.
    """
    config = llama3_debugmodel()
    config.dump_folder, config.checkpoint = folder, checkpoint
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Words.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 32, 2
    # The schedule must not depend on how far this start trains.
    config.lr_scheduler.total_steps = 100
    config.training.disable_cuda_graphs, config.compile.enable = True, False
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 5
    config.validator.enable = False
    return config


def trainer_of(config: Trainer.Config) -> Trainer:
    """Build a trainer whose gradients gloo can reduce."""
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
