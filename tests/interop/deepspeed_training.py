"""What a rank of a DeepSpeed job does: train, save, tell what it holds, resume. Run by `tests.support.gloo_worlds`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import holdfast
from tests.support.gloo_worlds import World

BATCH = 8
"""Samples of a step, over all ranks."""

WORDS = 53
STATES = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    """Odd lengths, a tied head, a frozen layer, a buffer that training counts in, a parameter of one element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 2.0]))
        self.emb, self.first = nn.Embedding(WORDS, width), nn.Linear(width, 2 * width + 1)
        self.norm = nn.LayerNorm(2 * width + 1)
        self.frozen = nn.Linear(2 * width + 1, width + 3).requires_grad_(False)
        self.last, self.head = nn.Linear(width + 3, width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(functional.gelu(self.first(self.emb(words))))
        hidden = self.last(functional.gelu(self.frozen(hidden * self.scale.mean().to(hidden.dtype))))
        return self.head(hidden * self.gain)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups of different rates, matrices and the rest."""
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim > 1]
    return [
        {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        {"params": [each for each in trained if each.ndim <= 1], "lr": 0.005, "weight_decay": 0.0},
    ]


def words_of(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one rank's part of a step's batch, which does not depend on how many ranks there are."""
    chance = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (BATCH, 6), generator=chance)
    mine = words[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
    return mine, mine.roll(1, dims=1)


def engine_of(world: World, config: Mapping[str, Any], width: int) -> Any:
    # DeepSpeed's communication for CPUs is built at first use, by ninja.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    os.environ |= {"LOCAL_RANK": str(world.rank), "RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = Model(width)
    optimizer = torch.optim.AdamW(groups_of(model), betas=(0.9, 0.95))
    sizes = {"train_micro_batch_size_per_gpu": BATCH // world.size, "steps_per_print": 10**9, "gradient_clipping": 0.0}
    settings = {**sizes, **config}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def run_steps(engine: Any, world: World, first: int, count: int) -> None:
    for step in range(first, first + count):
        words, following = words_of(step, world.rank, world.size)
        scores = engine(words)
        loss = functional.cross_entropy(scores.float().flatten(0, 1), following.flatten())
        engine.backward(loss)
        engine.step()


def trained_of(engine: Any) -> dict[str, Any]:
    return {name: each for name, each in engine.module.named_parameters() if each.requires_grad}


def link_states(engine: Any) -> None:
    """Make the optimizer's state known to parameters of every group; up to 0.19.8 DeepSpeed does so of the first."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero = engine.optimizer
    for partitions, groups in (
        ("single_partition_of_fp32_groups", "bit16_groups"),
        ("fp32_groups_flat_partition", "bf16_groups"),
    ):
        if hasattr(zero, partitions):
            for group, partition in zip(getattr(zero, groups), getattr(zero, partitions), strict=True):
                lazy_init_hp_params_optimizer_state(group, partition, zero.optimizer.state)


def live_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return master copies, moments and buffers, whole, as the engine holds them: a collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    link_states(engine)
    found = {}
    for name, parameter in trained_of(engine).items():
        found[f"optimizer.state.{name}.master"] = safe_get_full_fp32_param(parameter)
        for key in STATES:
            found[f"optimizer.state.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
    found |= {f"model.{name}": each for name, each in engine.module.named_buffers()}
    return {name: each.detach().clone().contiguous() for name, each in found.items()}


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights, frozen ones too, whole: a collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {f"model.{name}": each.detach().clone() for name, each in engine.module.named_parameters()}


def keep(world: World, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    if world.rank == 0:
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    dist.barrier()


def train(world: World, *, folder: str, config: dict[str, Any], width: int, steps: int, more: int) -> None:
    """Train, save with what the engine holds beside it, and go on, uninterrupted."""
    engine = engine_of(world, config, width)
    run_steps(engine, world, 0, steps)
    engine.save_checkpoint(f"{folder}/ckpt", client_state={"consumed": steps * BATCH})
    keep(world, {**live_state(engine), **weights_of(engine)}, Path(folder) / "live.safetensors")
    run_steps(engine, world, steps, more)
    keep(world, live_state(engine), Path(folder) / "uninterrupted.safetensors")


def refuse(world: World, *, folder: str, config: dict[str, Any], width: int, steps: int, more: int) -> None:
    """Try to save the engine, its module and its optimizer; `steps` and `more` are those of the other cases."""
    engine = engine_of(world, config, width)
    run_steps(engine, world, 0, 1)
    states = {"engine": {"model": engine}, "optimizer": {"model": Model(width), "optimizer": engine.optimizer}}
    if any(hasattr(parameter, "ds_id") for parameter in engine.module.parameters()):
        states["module"] = {"model": engine.module}
    for name, state in states.items():
        with pytest.raises(holdfast.InvalidError, match=r"DeepSpeed's .*engine\.save_checkpoint\(\)"):
            holdfast.save(f"{folder}/refused-{name}", state)
        assert not Path(f"{folder}/refused-{name}").exists()


def resume_own(world: World, *, folder: str, config: dict[str, Any], width: int, steps: int, more: int) -> None:
    """Go on as DeepSpeed itself does."""
    engine = engine_of(world, config, width)
    engine.load_checkpoint(f"{folder}/ckpt")
    run_steps(engine, world, steps, more)
    keep(world, live_state(engine), Path(folder) / "own.safetensors")


def put(world: World, parameter: Any, key: str, value: Any) -> None:
    """Give the engine a whole master copy or moment; of ZeRO-3 its own share, which whole ones of odd length break."""
    import deepspeed.utils as of

    cut = hasattr(parameter, "ds_id")
    if cut:
        value = value.flatten()
        share = -(-len(value) // world.size)
        value = functional.pad(value, (0, share * world.size - len(value)))[world.rank * share :][:share]
    if key == "master":
        (parameter.ds_tensor if cut else parameter).data.copy_(value)
        (of.safe_set_local_fp32_param if cut else of.safe_set_full_fp32_param)(parameter, value)
    else:
        (of.safe_set_local_optimizer_state if cut else of.safe_set_full_optimizer_state)(parameter, value, key)


def resume_through_holdfast(
    world: World, *, folder: str, result: str, config: dict[str, Any], width: int, steps: int, more: int
) -> None:
    """Go on in an engine of any stage and any number of ranks, with what Holdfast reads of the checkpoint."""
    engine = engine_of(world, config, width)
    run_steps(engine, world, 99, 1)  # The optimizer makes its state at its first step.
    link_states(engine)
    checkpoint = holdfast.open_checkpoint(f"{folder}/ckpt")
    for name, parameter in trained_of(engine).items():
        path = f"optimizer.state.{name}"
        for key in ("master", *STATES):
            put(world, parameter, key, checkpoint.read(f"{path}.{key}", framework="torch"))
        step = checkpoint.read(f"{path}.step", framework="torch")
    for state in engine.optimizer.optimizer.state.values():
        state["step"].copy_(step)
    run_steps(engine, world, steps, more)
    keep(world, live_state(engine), Path(folder) / f"{result}.safetensors")
