# ruff: noqa: E402
"""What torchtitan needs to train its Llama 3 debug model on CPUs with gloo. Nothing of its checkpointing is replaced.

It asks torch for an accelerator and takes CUDA if there is none, its attention has no backward on CPUs, gloo lacks one
reduction, and the wheel brings neither data nor tokenizer.

Import it before torchtitan. For a script: `torchrun --nproc-per-node 2 -m tests.integrations.torchtitan.on_cpu SCRIPT`.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import torch._utils

torch._dynamo.config.disable = True


def _be_one_rank() -> None:
    """Set what torchrun sets, if it did not: torchtitan needs it on one rank, too."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)


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


_be_one_rank()
_stand_in_for_a_device()

import torchtitan.distributed.utils
import torchtitan.trainer
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common import attention
from torchtitan.models.llama3 import config_registry
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
# Rank 0 sleeps two seconds after a training, for the logs of other machines.
torchtitan.trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})


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


_debug_model, _init_trainer = config_registry.llama3_debugmodel, Trainer.__init__


def _small_debug_model() -> Trainer.Config:
    """Return torchtitan's config with steps that a processor can train, and the data of this module."""
    config = _debug_model()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Words.Config()
    config.training.seq_len, config.training.local_batch_size = 32, 2
    config.training.disable_cuda_graphs, config.compile.enable = True, False
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed = 5
    config.comm.trace_buf_size = 0
    config.validator.enable = False
    return config


def _init_for_gloo(self: Trainer, config: Trainer.Config) -> None:
    _init_trainer(self, config)
    for part in self.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


config_registry.llama3_debugmodel = _small_debug_model
Trainer.__init__ = _init_for_gloo


def config_of(folder: str, steps: int, checkpoint: BaseCheckpointManager.Config) -> Trainer.Config:
    """Return the config of a short training of the debug model.

    Args:
        folder: The dump folder.
        steps: Train until this step.
        checkpoint: The checkpoints.
    """
    config = config_registry.llama3_debugmodel()
    config.dump_folder, config.checkpoint, config.training.steps = folder, checkpoint, steps
    # The schedule must not depend on how far this start trains.
    config.lr_scheduler.total_steps = 100
    return config


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
