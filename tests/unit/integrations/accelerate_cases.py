"""What two real processes do under Accelerate, for `test_accelerate.py`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdfast import Settings
from holdfast.errors import UnavailableError
from tests.support.forked_processes import write_whole
from tests.support.gloo_worlds import World

if TYPE_CHECKING:
    from holdfast.integrations.accelerate import Accelerator


class Broken:
    """An object whose state cannot be taken."""

    def state_dict(self) -> dict[str, object]:
        raise RuntimeError("its file is gone")

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def replicas(world: World, folder: str) -> dict[str, object]:
    """Train with DDP, save, go on, load, and go on again."""
    accelerator, model, optimizer, scheduler = prepared(world)
    accelerator.register_for_checkpointing(torch.nn.BatchNorm1d(3))

    def losses(steps: int) -> list[float]:
        return [step_of(accelerator, model, optimizer, scheduler) for _ in range(steps)]

    losses(3)
    accelerator.save_state(folder)
    first = losses(2)
    saved = digest(model)
    accelerator.load_state(folder)
    again = losses(2)
    alike = digest(model) == saved
    return {"first": first, "again": again, "alike": alike, "weight": model.module.weight.tolist()}


def background(world: World, folder: str) -> list[str]:
    """Save in the background; process 0 alone sees an end first, and all raise alike."""
    accelerator, model, optimizer, scheduler = prepared(world)
    step_of(accelerator, model, optimizer, scheduler)
    accelerator.save_state(Path(folder) / "good", wait=False)
    accelerator.wait_for_saves()
    accelerator.register_for_checkpointing(Broken())
    accelerator.save_state(Path(folder) / "bad", wait=False)
    return [raised(lambda: accelerator.save_state(Path(folder) / "next")), raised(accelerator.wait_for_saves)]


def hooks(world: World, folder: str) -> list[str]:
    """Have a hook fail on one process only, and another take weights on the main process only."""
    accelerator, *_ = prepared(world)

    def fail_on_one(models: object, weights: object, folder: str) -> None:
        if world.rank == 1:
            raise OSError("no room")

    handle = accelerator.register_save_state_pre_hook(fail_on_one)
    failed = raised(lambda: accelerator.save_state(folder))
    handle.remove()

    def take(models: object, weights: list[object], folder: str) -> None:
        if accelerator.is_main_process:
            weights.pop()

    accelerator.register_save_state_pre_hook(take)
    accelerator.save_state(folder)
    return [failed, *names_in(folder)]


class Numbers(torch.utils.data.IterableDataset):
    """A dataset that process 0 iterates for all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(16.0)


def data(world: World, folder: str) -> dict[str, object]:
    """Save between epochs; return the next two as they are and as they come after a load."""
    accelerator, *_ = prepared(world)
    examples = torch.arange(16.0)
    shuffled, dispatched = accelerator.prepare(
        torch.utils.data.DataLoader(examples, batch_size=2, shuffle=True),
        torch.utils.data.DataLoader(Numbers(), batch_size=2),
    )
    seen: dict[str, object] = {}

    def iterate(name: str) -> None:
        seen[f"shuffled{name}"] = [[batch.tolist() for batch in shuffled] for _ in range(2)]
        seen[f"dispatched{name}"] = [batch.tolist() for batch in dispatched]

    list(shuffled)
    list(dispatched)
    accelerator.save_state(folder)
    iterate("")
    accelerator.load_state(folder)
    seen["epochs"] = [shuffled.iteration, dispatched.iteration]
    iterate(" again")
    return seen


class Unknown:
    """The handle of a save whose end this process does not know."""

    def __init__(self) -> None:
        self.committed: Future[None] = Future()
        self.failure = UnavailableError("the outcome is unknown")
        self.committed.set_exception(self.failure)

    def wait(self, until: str = "committed") -> None:
        raise self.failure


def unknown(world: World, folder: str) -> list[str]:
    """Have process 1 not know how a save in the background ended, which process 0 has seen committed."""
    accelerator, *_ = prepared(world, settings=Settings(failed_saves_max=3))
    accelerator.save_state(Path(folder) / "1", wait=False)
    if world.rank == 1:
        accelerator._saves[0][1].wait()
        accelerator._saves[0] = (accelerator._saves[0][0], Unknown())
    accelerator._saves[0][1].committed.exception()
    accelerator.save_state(Path(folder) / "2")
    return [raised(accelerator.wait_for_saves), raised(accelerator.wait_for_saves)]


def damaged(world: World, folder: str) -> list[float]:
    """Load beside a newest checkpoint whose damage lies in bytes that process 1 alone reads; return what was loaded."""
    from accelerate.utils import ProjectConfiguration

    from holdfast import PerRank

    accelerator, *_ = prepared(world)
    accelerator.project_configuration = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    own = torch.nn.Linear(1, 1)
    accelerator.register_for_checkpointing(PerRank(own))
    for mark in (1234.5, 4321.5):
        torch.nn.init.constant_(own.weight, mark + world.rank)
        newest = accelerator.save_state()
    if world.rank == 1:
        part = next(newest.glob("*/parts/r00001.msgpack"))
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    accelerator.wait_for_everyone()
    accelerator.load_state()
    return [own.weight.item(), accelerator.save_iteration]


def late(world: World, folder: str) -> bool:
    """Have process 1 call once process 0 has said that it waits; return whether it has said so."""
    from holdfast.integrations.accelerate import ranks

    accelerator, *_ = prepared(world)
    ranks.HINT_SECONDS, said = 0.01, world.scratch / "said"
    if world.rank == 0:
        handler = logging.Handler()
        handler.emit = lambda record: write_whole(said, record.getMessage())  # type: ignore[method-assign]
        ranks.logger.addHandler(handler)
    else:
        while not said.exists():
            time.sleep(0.005)
    accelerator.save_state(folder)
    return "Do not call them under `if accelerator.is_main_process:`" in said.read_text()


def prepared(world: World, **how: object) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer, object]:
    """Return an Accelerator of this world's processes, and what it has prepared."""
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    from accelerate.state import AcceleratorState, GradientState

    from holdfast.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **how)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def step_of(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: object
) -> float:
    loss = model(torch.randn(3, 4) + accelerator.process_index).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def digest(model: torch.nn.Module) -> list[object]:
    return [each.tolist() for each in model.parameters()]


def names_in(folder: str) -> list[str]:
    import holdfast

    return sorted(holdfast.open_checkpoint(folder).tensors)


def raised(call: object) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
