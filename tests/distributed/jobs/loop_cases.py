"""What ranks do in the tests of training loops that leave it to Holdfast when to save."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.policies import AnyOf, BestN, EveryNSteps, EverySeconds, OnRequest, SavePolicy
from holdfast.settings import Settings
from tests.support.gloo_worlds import World

SETTINGS = Settings(commit_timeout_seconds=30.0)


def loop(
    manager: holdfast.CheckpointManager,
    world: World,
    steps: int,
    *,
    asking: tuple[int, int] | None = None,
    late: float = 0.0,
    together: bool = True,
) -> list[int]:
    """Train; return the steps at which this rank began a save.

    Args:
        manager: The run.
        world: The ranks.
        steps: How many.
        asking: Which rank asks for a save, at which step.
        late: Seconds each step takes the last rank longer than the others.
        together: Whether each step ends with a collective, as steps do.
    """
    weights = torch.full((64,), 1.0)
    saved = []
    for step in range(1, steps + 1):
        if late and world.rank == world.size - 1:
            time.sleep(late)
        gradient = torch.full((64,), float(world.rank))
        if together:
            dist.all_reduce(gradient)
        else:
            gradient = torch.full((64,), sum(range(world.size)) * 1.0)
        weights += gradient
        if (world.rank, step) == asking:
            manager.request_save()
        if manager.maybe_save(step, {"weights": weights, "step": step}) is not None:
            saved.append(step)
    manager.wait()
    return saved


def trained(world: World, root: str, save: SavePolicy, steps: int, **arguments: object) -> dict[str, object]:
    with holdfast.CheckpointManager(root, save=save, settings=SETTINGS) as manager:
        saved = loop(manager, world, steps, **arguments)  # type: ignore[arg-type]
        dist.barrier()
        state = {"weights": torch.zeros(64), "step": 0}
        newest = manager.load(state)
        return {
            "saved": saved,
            "steps": manager.steps(),
            "newest": newest,
            "whole": torch.equal(state["weights"], torch.full((64,), 1.0 + (newest or 0) * sum(range(world.size)))),
        }


def by_time(world: World, root: str) -> dict[str, object]:
    return trained(world, root, EverySeconds(0.3), 200, late=0.02)


def by_time_far_apart(world: World, root: str) -> dict[str, object]:
    """Ranks that nothing holds together but what rank 0 has announced."""
    return trained(world, root, AnyOf(EverySeconds(0.3), EveryNSteps(25)), 60, late=0.02, together=False)


def on_request(world: World, root: str, asking: int) -> dict[str, object]:
    return trained(world, root, OnRequest(), 60, asking=(asking, 20), late=0.05)


def metrics_of_rank_0(world: World, root: str) -> dict[str, object]:
    with holdfast.CheckpointManager(root, every=1, keep=BestN(2, "loss"), settings=SETTINGS) as manager:
        refused = ""
        try:
            # Misspelt, on the rank that counts; the others give none.
            manager.maybe_save(1, {"a": 1}, metrics={"los": 0.5} if world.rank == 0 else None)
        except holdfast.InvalidError as error:
            refused = str(error)
        manager.maybe_save(2, {"a": 1}, metrics={"loss": torch.tensor(0.5)} if world.rank == 0 else {"loss": 9.0})
        manager.wait()
        bad = ""
        try:
            # Not the first save: the refusal is in the handle, on every rank.
            manager.save(3, {"a": 1}, metrics={"loss": "low"} if world.rank == 1 else {"loss": 1.0}).wait()
        except holdfast.InvalidError as error:
            bad = str(error)
        manager.save(4, {"a": 1})
    dist.barrier()
    return {
        "refused": refused,
        "bad": bad,
        "metrics": {
            step: dict(holdfast.open_checkpoint(Path(root) / f"step-{step:012d}").manifest.metrics)
            for step in manager.steps()
        },
    }
