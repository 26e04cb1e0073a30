"""Processes that save to an object store: eight that race for one path, and ones that are killed on the way.

All are forked from one process, which has imported torch and made no request.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import torch

import holdfast
from holdfast.settings import KIB, Settings
from tests.campaign.network import state_of
from tests.support.tuning import tuned

RACERS = 8

STEPS_UNTIL_KILLED = 6
"""Steps that a process saves if nobody kills it."""


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


def _saves_until_killed(url: str, said: int) -> None:
    torch.set_num_threads(1)
    settings = tuned(Settings(collect_grace_seconds=0.0), full_pack_bytes=64 * KIB, cell_elements=16 * KIB)
    with holdfast.CheckpointManager(url, keep_last=2, settings=settings, preemption=False) as manager:
        for step in range(1, STEPS_UNTIL_KILLED + 1):
            manager.save(step, state_of(step)).wait()
            os.write(said, f"{step}\n".encode())


def killed_at_times(url: str, times: str, path: str, seed: str) -> None:
    """Kill processes one after the other, each at a random time of its saves.

    Leaves for each its name, the steps that were acknowledged, and whether it was killed, one line of JSON each.
    """
    context = multiprocessing.get_context("fork")
    chance = random.Random(int(seed))
    seconds = 4.0
    """How long a process takes; corrected by each that ends before it is killed, or after all of its saves."""
    for number in range(int(times)):
        reading, writing = os.pipe()
        began = time.monotonic()
        process = context.Process(target=_saves_until_killed, args=(f"{url}/{number}", writing))
        process.start()
        os.close(writing)
        process.join(chance.random() * seconds)
        is_killed = process.exitcode is None
        if is_killed:
            process.kill()
            process.join()
        acknowledged = b""
        while data := os.read(reading, 1024):
            acknowledged += data
        os.close(reading)
        steps = [int(line) for line in acknowledged.split()]
        if len(steps) == STEPS_UNTIL_KILLED:
            seconds = time.monotonic() - began
        assert is_killed or process.exitcode == 0
        with open(path, "a") as file:
            file.write(json.dumps({"name": str(number), "acknowledged": steps, "is_killed": is_killed}) + "\n")


WORKS: dict[str, Callable[..., None]] = {"race": race, "killed": killed, "killed_at_times": killed_at_times}

IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "holdfast._face.checkpoint_manager",
    "holdfast.backends.torch.framework",
)
"""Once for all forks: what a save imports, but for the client of the object store."""

if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    WORKS[sys.argv[1]](*sys.argv[2:])
