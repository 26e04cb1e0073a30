"""Processes that save to an object store: eight that race for one path, and ones that are killed on the way.

All are forked from one process, which has imported torch and made no request.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import torch

import holdfast

RACERS = 8


def _race(number: int, url: str, rounds: int, barrier: Barrier, path: str) -> None:
    torch.set_num_threads(1)
    outcomes = []
    for turn in range(rounds):
        barrier.wait()
        try:
            holdfast.save(f"{url}/{turn}", {"winner": torch.full((100,), number)})
            outcomes.append("won")
        except Exception as error:  # The test looks at what it was.
            outcomes.append(type(error).__name__)
    with open(f"{path}.{number}", "w") as file:
        json.dump(outcomes, file)


def race(url: str, rounds: str, path: str) -> None:
    """Race for `rounds` paths; leave what came of it for each racer."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(RACERS)
    racers = [context.Process(target=_race, args=(number, url, int(rounds), barrier, path)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0


def _saves(url: str) -> None:
    torch.set_num_threads(1)
    state = {"weights": torch.arange(10_000.0), "step": 1}
    # The server kills this process by its number, at some request of the second step.
    with holdfast.CheckpointManager(f"{url}/{os.getpid()}", preemption=False) as manager:
        manager.save(1, state).wait()
        manager.save(2, {"weights": state["weights"] + 1, "step": 2}).wait()


def killed(url: str, times: str, path: str) -> None:
    """Run processes one after the other that save two steps; leave number and exit status of each."""
    context = multiprocessing.get_context("fork")
    ends = []
    for _ in range(int(times)):
        process = context.Process(target=_saves, args=(url,))
        process.start()
        process.join()
        ends.append((process.pid, process.exitcode))
    with open(path, "w") as file:
        json.dump(ends, file)


WORKS: dict[str, Callable[[str, str, str], None]] = {"race": race, "killed": killed}

IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "holdfast.checkpoint_manager",
    "holdfast.frameworks.torch.framework",
)
"""Once for all forks: what a save imports, but for the client of the object store."""

if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    WORKS[sys.argv[1]](*sys.argv[2:])
