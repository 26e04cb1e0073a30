"""Saves of torchtitan's Llama 3 by HoldfastManager, by torchtitan's DCP manager in async mode, and by `holdfast.save`.

Each save is the second of its manager: a training saves many times, so that buffers are warm. Between the two, every
tensor changes, so that nothing is deduplicated. torchtitan's torch_checkpointing manager is no rival yet: it imports a
module that torch_checkpointing 0.1.1 lacks, and its methods raise NotImplementedError.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.integrations.common import seconds, state_bytes, sync_tree
from tests.integrations.torchtitan import on_cpu

# isort: split
from torch import distributed
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.models import llama3
from torchtitan.trainer import Trainer

import holdfast
from holdfast.integrations.torchtitan import HoldfastManager
from holdfast.integrations.torchtitan.model import TitanModel

KEYS = {
    "titan_stall": ("own_stall", "ours_stall"),
    "titan_stall_lazy": ("own_stall", "ours_lazy_stall"),
    "titan_save": ("own", "ours"),
    "integration_overhead": ("ours_awaited", "plain"),
}


def round(place: Path, number: int) -> dict[str, float]:
    """Return the seconds of this rank for one save of each kind; each round begins with another kind."""
    _trainer()  # Makes the process group.
    kinds = [_own, _ours, _lazy, _awaited, _plain]
    times: dict[str, float] = {}
    for kind in kinds[number % 5 :] + kinds[: number % 5]:
        with _fresh(place / kind.__name__) as folder:
            times |= kind(folder)
    return times


def _own(folder: Path) -> dict[str, float]:
    manager = _built(CheckpointManager.Config(async_mode="async", **_KEEPS), folder)
    _warmed(lambda: manager.save(1), manager.maybe_wait_for_saving)
    began = time.perf_counter()
    stall = seconds(lambda: manager.save(2))
    manager.maybe_wait_for_saving()
    unsynced = time.perf_counter() - began
    if distributed.get_rank() == 0:
        sync_tree(folder / "checkpoint" / "step-2")
    durable = time.perf_counter() - began
    manager.close()
    return {"own_stall": stall, "own_unsynced": unsynced, "own": durable}


def _ours(folder: Path) -> dict[str, float]:
    manager = _built(HoldfastManager.Config(**_KEEPS), folder)
    _warmed(lambda: manager.save(1), manager.maybe_wait_for_saving)
    began = time.perf_counter()
    stall = seconds(lambda: manager.save(2))
    manager.maybe_wait_for_saving()
    committed = time.perf_counter() - began
    manager.close()
    return {"ours_stall": stall, "ours": committed}


def _lazy(folder: Path) -> dict[str, float]:
    """Measure the call, and what the next step of training waits for the copies, after its forward and backward."""
    manager = _built(HoldfastManager.Config(async_mode="async_with_pinned_mem", **_KEEPS), folder)
    _warmed(lambda: manager.save(1), manager.maybe_wait_for_saving)
    trainer, fence = _trainer(), manager.maybe_wait_for_staging
    waited: list[float] = []
    manager.maybe_wait_for_staging = lambda: waited.append(seconds(fence))
    stall = seconds(lambda: manager.save(2))
    trainer.checkpointer = manager
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    manager.close()
    return {"ours_lazy_stall": stall + sum(waited)}


def _awaited(folder: Path) -> dict[str, float]:
    manager = _built(HoldfastManager.Config(async_mode="disabled", **_KEEPS), folder)
    _warmed(lambda: manager.save(1))
    took = seconds(lambda: manager.save(2))
    manager.close()
    return {"ours_awaited": took}


def _plain(folder: Path) -> dict[str, float]:
    trainer = _trainer()
    state = {
        "model": TitanModel(trainer.model_parts).tensors(),
        "optimizer": trainer.optimizers,
        "lr_scheduler": trainer.lr_schedulers,
        "dataloader": holdfast.PerRank(trainer.dataloader),
        "train_state": trainer,
    }
    _warmed(lambda: holdfast.save(folder / "first", state))
    return {"plain": seconds(lambda: holdfast.save(folder / "second", state))}


_KEEPS: dict[str, Any] = {"enable": True, "interval": 1, "last_save_model_only": False, "keep_latest_k": 0}


def _built(config: Any, folder: Path) -> Any:
    trainer = _trainer()
    return config.build(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder=str(folder),
    )


def _warmed(*calls: Callable[[], object]) -> None:
    """Save once; then change all tensors, and wait for the other rank."""
    for call in calls:
        call()
    trainer = _trainer()
    with torch.no_grad():
        for optimizer in trainer.optimizers:
            for parameter, moments in optimizer.state.items():
                for tensor in (parameter, *moments.values()):
                    getattr(tensor, "_local_tensor", tensor).add_(1e-3)
    distributed.barrier()


@cache
def _trainer() -> Trainer:
    """Return torchtitan's trainer of a Llama 3 of the asked size, with moments as after a step."""
    config = on_cpu.config_of("unused", 10, CheckpointManager.Config())
    assert config.model_spec is not None
    # Two ranks; a parameter and two moments, four bytes each.
    config.model_spec.model = _llama(2 * state_bytes() // 12)
    trainer = config.build()
    for optimizer in trainer.optimizers:
        init_optim_state(optimizer)
    return trainer


def _llama(parameters: int) -> Any:
    """Return torchtitan's description of its debug model, wider, with layers for about so many parameters."""
    dim = 1024 if parameters > 20e6 else 256
    layers = max(1, int((parameters - 2 * on_cpu.WORDS * dim) / (12.25 * dim**2)))
    debug = llama3.llama3_configs["debugmodel"]("flex")
    block = llama3._build_llama3_layers(
        n_layers=layers,
        dim=dim,
        n_heads=16,
        hidden_dim=llama3.compute_ffn_hidden_dim(dim, multiple_of=256),
        rope=llama3.ComplexRoPE.Config(dim=dim // 16, max_seq_len=8192, theta=500000, scaling="llama"),
        attn_backend="flex",
    )
    debug.dim, debug.layers = dim, block
    debug.tok_embeddings.embedding_dim = dim
    debug.norm.normalized_shape = dim
    debug.lm_head.in_features = dim
    return debug


@contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    if distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    distributed.barrier()
    yield folder
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(folder)
