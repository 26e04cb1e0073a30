"""What ranks do in the tests of what differs by rank."""

from __future__ import annotations

import logging
import os
import platform

import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import CheckpointError
from tests.distributed.launch import World


def _outcome(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def patterns_by_stage(world: World, path: str) -> dict[str, str]:
    """Save and load stages of a pipeline with patterns that one stage, or none, has names for."""
    mine = f"layer{world.rank}"
    state = {"model": {mine: torch.full((4,), float(world.rank))}}

    def load(**patterns: str) -> str:
        state["model"][mine].zero_()
        said = _outcome(lambda: holdfast.load(f"{path}-all", state, **patterns))
        return f"{said} {int(state['model'][mine].sum())}"

    return {
        "one stage": _outcome(lambda: holdfast.save(f"{path}-one", state, only="model.layer1")),
        "no stage": _outcome(lambda: holdfast.save(f"{path}-none", state, only=["model.layer1", "model.layer7"])),
        "skip": _outcome(lambda: holdfast.save(f"{path}-skip", state, skip="model.layer7")),
        "other by rank": _outcome(lambda: holdfast.save(f"{path}-mine", state, only=f"model.{mine}")),
        "all": _outcome(lambda: holdfast.save(f"{path}-all", state)),
        "load of one": load(only="model.layer1"),
        "load of none": load(only="modle.layer1"),
    }


def root_unseen_by_one(world: World, path: str, blind: int) -> dict[str, object]:
    """Load where one rank finds an empty mount point instead of the run."""
    with holdfast.CheckpointManager(f"{path}-{blind}") as manager:
        manager.save(1000, {"w": torch.ones(4)}).wait()
    dist.barrier()
    root = f"{path}-{blind}" + ("-unmounted" if world.rank == blind else "")
    state = {"w": torch.zeros(4)}
    with holdfast.CheckpointManager(root) as manager:
        said = _outcome(lambda: manager.load(state))
    return {"said": said, "host": platform.node(), "sum": float(state["w"].sum()), "left": os.path.exists(root)}


def root_of_a_new_run(world: World, path: str) -> object:
    with holdfast.CheckpointManager(path) as manager:
        return manager.load({"w": torch.zeros(4)})


class Warnings:
    """Collects the warnings of Holdfast's log in a block."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.texts.append(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> list[str]:
        logging.getLogger("holdfast").addHandler(self._handler)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("holdfast").removeHandler(self._handler)


def glob_that_matches_nothing(world: World, path: str) -> list[str]:
    """Save twice with a glob in `skip` that matches nothing; return what was logged."""
    state = {"model": torch.ones(4)}
    with Warnings() as texts, holdfast.CheckpointManager(path) as manager:
        for step in (1, 2):
            manager.save(step, state, skip="modle.*").wait()
    return texts
