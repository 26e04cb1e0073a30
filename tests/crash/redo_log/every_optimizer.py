"""Each optimizer on real ranks: a training, and the same training abandoned at a step and resumed, as a case."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.crash.redo_log.recorded_run import kill, wait_for_seal
from tests.support.gloo_worlds import World
from tests.support.redo_log.optimizer_variants import maker_of
from tests.support.redo_log.recorded_training import Training

STEPS = 12

STOPS = tuple(range(2, STEPS))
"""Steps to be killed at. At 8 `zero_grad(set_to_none=False)` leaves zeros, and the branch gets no gradient at step 9:
torch steps the branch with these zeros."""


class _RankTraining(Training):
    def of_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of all ranks."""
        torch.distributed.all_reduce(loss)
        return loss


class DdpTraining(_RankTraining):
    """Replicas: the ranks reduce gradients at the last batch of a step."""

    def laid_out(self) -> nn.Module:
        """Wrap the model."""
        return DistributedDataParallel(self.model, find_unused_parameters=True)

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of one batch of a step."""
        assert isinstance(self.trained, DistributedDataParallel)
        return nullcontext() if is_last else self.trained.no_sync()


class Fsdp2Training(_RankTraining):
    """Shards of model and average."""

    norm = nn.LayerNorm

    def laid_out(self) -> nn.Module:
        """Shard the branch on its own: it has no gradient at some steps."""
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for model in (self.model, self.average):
            for part in (model.branch, model):
                fully_shard(part, mesh=mesh)
        return self.model

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of one batch of a step."""
        assert isinstance(self.trained, FSDPModule)
        self.trained.set_requires_gradient_sync(is_last)
        return nullcontext()


LAYOUTS: Mapping[str, type[Training]] = {"ddp": DdpTraining, "fsdp2": Fsdp2Training}


def abandon(world: World, layout: str, variant: str, root: str) -> dict[str, object] | None:
    """Train to the end without a log, then again with one up to a drawn step; return that step and the bits of the end.

    Returns:
        None if torch lacks the class.
    """
    whole, dead = (_training_of(world, layout, variant) for _ in range(2))
    if whole is None or dead is None:
        return None
    torch.manual_seed(100 + world.rank)
    while whole.step < STEPS:
        whole.train()
    bits = dict(_bits_of(whole.bits()))
    stop = random.Random(variant).choice(STOPS)
    torch.manual_seed(100 + world.rank)
    manager = holdfast.CheckpointManager(root, every=100, differential=True)
    while dead.step < stop:
        dead.train()
        manager.maybe_save(dead.step, dead.state())
    wait_for_seal(manager, stop)
    _ABANDONED.append((manager, dead))
    return {"stop": stop, "bits": bits}


def killed(world: World) -> None:
    """Kill this rank with all that it abandoned, once the other ranks have left their results."""
    torch.distributed.barrier()
    kill()


def resume(world: World, layout: str, variant: str, root: str) -> dict[str, object] | None:
    """Load into a training of other values, and train to the end."""
    training = _training_of(world, layout, variant, seed=8)
    if training is None:
        return None
    with holdfast.CheckpointManager(root, every=100, differential=True) as manager:
        state = training.state()
        start, report = manager.load(state), manager.load_report
        assert report is not None
        training.values = state["values"]
        training.step = training.values["step"]
        while training.step < STEPS:
            training.train()
            manager.maybe_save(training.step, training.state())
    bits = dict(_bits_of(training.bits()))
    return {"start": start, "redone": report.redone_steps, "why": report.why_not_further, "bits": bits}


_ABANDONED: list[object] = []
"""Managers and trainings that only the end of the process ends."""


def _training_of(world: World, layout: str, variant: str, seed: int = 7) -> Training | None:
    make = maker_of(variant)
    if make is None:
        return None
    return LAYOUTS[layout](make, matrices=variant == "muon", rank=world.rank, seed=seed)


def _bits_of(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each leaf, as this rank holds it."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _bits_of(inner, f"{name}.{key}")
        return
    if isinstance(value, torch.Tensor):
        local = (value.to_local() if isinstance(value, DTensor) else value).detach().contiguous()
        data = f"{local.dtype}{local.shape}".encode() + local.numpy().tobytes()
    else:
        data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    yield name, hashlib.sha256(data).hexdigest()
