"""A rank of a job that Transformers cuts by FSDP2 and tensor parallelism. Run by `tests.support.gloo_worlds`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import holdfast
from tests.support.gloo_worlds import World

WORDS = 64
STATES = ("exp_avg", "exp_avg_sq", "step")


def write_model(folder: Path) -> None:
    """Store a tiny Llama, from which every job is built."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


class Training:
    """A Llama that Transformers splits, and AdamW."""

    def __init__(self, world: World, folder: str, config: Mapping[str, int]) -> None:
        os.environ |= {"LOCAL_RANK": str(world.rank), "RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        split = {"distributed_config": DistributedConfig(**config)} if config else {}
        self.model: Any = LlamaForCausalLM.from_pretrained(f"{folder}/model", **split)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        """Take a step over one batch, the same on every rank and for every number of ranks."""
        words = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.model(input_ids=words, labels=words).loss.backward()
        self.optimizer.step()

    def whole(self) -> dict[str, torch.Tensor]:
        """Return parameters and optimizer state, whole: a collective."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter
            found |= {f"{name}.{key}": self.optimizer.state[parameter][key] for key in STATES}
        return {name: _whole(each).detach().clone().contiguous() for name, each in found.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(world: World, *, folder: str, config: dict[str, int]) -> list[str]:
    """Train, save, and go on, uninterrupted; return how the parameters of this rank are laid out."""
    training = Training(world, folder, config)
    for number in range(2):
        training.step(number)
    saved = training.whole()
    with holdfast.CheckpointManager(f"{folder}/run") as manager:
        manager.save(2, training.state).wait()
    training.step(2)
    after = training.whole()
    if world.rank == 0:
        save_file(saved, f"{folder}/saved.safetensors")
        save_file(after, f"{folder}/after.safetensors")
    dist.barrier()
    meshes = [each.device_mesh for each in training.model.parameters()]
    return sorted({f"{mesh.mesh_dim_names} of ranks {mesh.mesh.flatten().tolist()}" for mesh in meshes})


def resume(world: World, *, folder: str, config: dict[str, int], is_exact: bool) -> int | None:
    """Build the model on a layout, load, compare with what was saved, and take the next step."""
    training = Training(world, folder, config)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    with holdfast.CheckpointManager(f"{folder}/run") as manager:
        loaded = manager.load(training.state)
    saved, found = load_file(f"{folder}/saved.safetensors"), training.whole()
    assert found.keys() == saved.keys()
    for name, expected in saved.items():
        assert torch.equal(found[name], expected), name
    training.step(2)
    after, found = load_file(f"{folder}/after.safetensors"), training.whole()
    for name, expected in after.items():
        if is_exact:
            assert torch.equal(found[name], expected), name
        else:  # Sums run in another order.
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-5, msg=name)
    return loaded
