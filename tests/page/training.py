"""Trainings on real ranks, one of which has a store that waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import Settings, observers
from holdfast.backends.stores.local import LocalStore
from holdfast.base.ports.store import Upload
from tests.support.gloo_worlds import World

WAIT_SECONDS = 1.2
SLOW_RANK = 1


class WaitingStore(LocalStore):
    """The folder of a run; each upload waits for a while, and for ever once `hang` is set."""

    wait_seconds = 0.0
    hang: Path | None = None

    def upload(self, *arguments: Any, **options: Any) -> Upload:
        if self.hang is not None:
            self.hang.touch()
            time.sleep(600)
        time.sleep(self.wait_seconds)
        return super().upload(*arguments, **options)


def state_of(world: World, step: int) -> dict[str, object]:
    weight = torch.full((64, 8), float(step))
    return {
        "model": {"weight": weight, "other": weight * 2},
        "own": holdfast.PerRank({"rank": world.rank, "step": step}),
    }


def manager_of(world: World, root: str) -> tuple[holdfast.CheckpointManager, WaitingStore]:
    store = WaitingStore(root, settings=Settings())
    store.url = f"waiting://{root}"  # A store of a user has a scheme of its own.
    store.wait_seconds = WAIT_SECONDS if world.rank == SLOW_RANK else 0.0
    events = observers.jsonl(Path(root).with_name("events-{rank}.jsonl"))
    return holdfast.CheckpointManager(store, observers=[events]), store


def hangs(world: World, root: str) -> None:
    """Save five steps, and hang in the sixth on one rank."""
    manager, store = manager_of(world, root)
    for step in range(100, 600, 100):
        manager.save(step, state_of(world, step)).wait()
    if world.rank == SLOW_RANK:
        store.hang = world.scratch / "hanging"
    manager.save(600, state_of(world, 600)).wait()


def goes_back(world: World, root: str) -> None:
    """Resume, save two steps, go back before them, and save one."""
    manager, _ = manager_of(world, root)
    with manager:
        state = state_of(world, 0)
        assert manager.load(state) == 500
        for step in (600, 700):
            manager.save(step, state_of(world, step)).wait()
        manager.load(state, step=500)
        manager.save(550, state_of(world, 550)).wait()
