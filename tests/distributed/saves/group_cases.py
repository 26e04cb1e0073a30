"""What ranks do in the tests of saves by path: groups that come and go, and settings of many kinds."""

from __future__ import annotations

import gc
import logging
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast._face import wiring
from tests.support.gloo_worlds import World


def groups_come_and_go(world: World, rounds: int) -> list[dict[str, int]]:
    """Save by path over a group of its own in each round; return what this process holds after each."""
    held = []
    for number in range(rounds):
        group = dist.new_group(list(range(world.size)))
        holdfast.async_save(world.scratch / f"group-{number}", {"w": torch.ones(1000)}, process_group=group).wait()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        held.append(_held(world))
    return held


def settings_of_many_kinds(world: World, rounds: int) -> list[dict[str, int]]:
    """Save by path with other settings in each round; return what this process holds after each."""
    held = []
    for number in range(rounds):
        settings = holdfast.Settings(lease_seconds=20.0 + number)
        holdfast.async_save(world.scratch / f"settings-{number}", {"w": torch.ones(1000)}, settings=settings).wait()
        dist.barrier()
        held.append(_held(world))
    # The one of the first round was dropped meanwhile: made anew, it saves as before.
    settings = holdfast.Settings(lease_seconds=20.0)
    holdfast.save(world.scratch / "settings-again", {"w": torch.ones(1000)}, settings=settings)
    return held


def random_states_of_other_numbers(world: World) -> dict[str, list[str]]:
    """Save random states on every rank and on one, load both on other ranks; return what each load logs."""
    pair = dist.new_group([0, 1])
    first = {"rng": holdfast.RngState(), "more": {"rng": holdfast.RngState()}}
    said: dict[str, list[str]] = {}
    holdfast.save(world.scratch / "rng-all", first)
    if world.rank == 0:
        holdfast.save(world.scratch / "rng-one", first, process_group=False)
    dist.barrier()
    for saved in ("all", "one"):
        said[f"{saved} to all"] = _logged_by_load(world.scratch / f"rng-{saved}", first, None)
        if world.rank < 2:
            said[f"{saved} to pair"] = _logged_by_load(world.scratch / f"rng-{saved}", first, pair)
        if world.rank == 0:
            said[f"{saved} to one"] = _logged_by_load(world.scratch / f"rng-{saved}", first, False)
    return said


def _logged_by_load(path: Path, state: dict[str, object], group: object) -> list[str]:
    """Load; return the lines that name a random state."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        holdfast.load(path, state, process_group=group)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "rng: " in line]


def _held(world: World) -> dict[str, int]:
    gc.collect()
    jobs = sum(len(jobs) for jobs in wiring._jobs.values())
    return {"jobs": jobs, "threads": threading.active_count(), "connections": _connections(world)}


def _connections(world: World) -> int:
    """Return the connections of this process to the key-value store."""
    port = f":{int((world.scratch / 'port').read_text()):04X}"
    sockets = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue  # The descriptor of the listing itself.
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return sum(fields[2].endswith(port) and fields[3] == "01" and fields[9] in sockets for fields in lines)
