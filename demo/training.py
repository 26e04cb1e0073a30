"""One rank of the training run: model, optimizer, scheduler and a step that is the same to the last bit each time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from demo.gpt import GPT, Shape
from demo.text import batch, corpus

SAMPLES = 6
"""Samples of one step over all ranks: one, two and three ranks share them evenly."""

WARMUP_STEPS = 5
DECAY_STEPS = 200


class Training:
    """A GPT in training, sharded over the default process group if there is one.

    Args:
        seed: Of the first weights. A run that resumes takes another one, so that nothing but loading can make it equal.
    """

    def __init__(self, *, seed: int) -> None:
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.shape = Shape()
        self.text = corpus()
        self.model = GPT(self.shape)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (self.ranks,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _warm_up_then_decay)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def state(self) -> dict[str, object]:
        """Return everything that has to survive."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "step": 0,
            "run": {"samples": SAMPLES, "text_bytes": len(self.text), "betas": (0.9, 0.999)},
        }

    def advance(self, step: int) -> float:
        """Train one step and return its loss, the mean over all ranks."""
        tokens = batch(self.text, step=step, samples=SAMPLES, context=self.shape.context)
        own = tokens.tensor_split(self.ranks)[self.rank]
        loss = self.model(own[:, :-1], own[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        mean = loss.detach() / self.ranks
        if self.ranks > 1:
            dist.all_reduce(mean)
        return float(mean)

    def digests(self) -> dict[str, str]:
        """Return the digest of every whole tensor by name; a collective where there are several ranks."""
        return {name: _digest(tensor) for name, tensor in self._tensors()}

    def values(self, state: dict[str, object]) -> dict[str, object]:
        """Return the plain values that have to survive, as text that is exact for floats."""
        groups = [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "step": repr(state["step"]),
            "run": repr(state["run"]),
            "groups": groups,
            "scheduler": {key: repr(value) for key, value in self.scheduler.state_dict().items()},
        }

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self.model.named_parameters():
            names[parameter] = name
            yield f"model.{name}", parameter
        for parameter, name in names.items():
            for key, value in sorted(self.optimizer.state[parameter].items()):
                yield f"optimizer.state.{name}.{key}", value


def _warm_up_then_decay(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(step, DECAY_STEPS) / DECAY_STEPS))


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().contiguous().flatten().view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data.data)
