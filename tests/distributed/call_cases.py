"""What ranks do in the tests of calls that one rank makes late: it calls once the other has logged its absence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.coordination import absent_ranks
from tests.distributed.launch import World

WAIT_SECONDS = 50.0


class _Marking(logging.Handler):
    """Keeps what is logged, and makes a file at the first line."""

    def __init__(self, marker: Path) -> None:
        super().__init__(logging.WARNING)
        self._marker = marker
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._marker.touch()


@contextmanager
def asking_at_once(marker: Path) -> Iterator[list[str]]:
    """Ask at once which ranks are absent; give the block the lines that are logged."""
    handler = _Marking(marker)
    limits = absent_ranks._ARRIVAL_SECONDS, absent_ranks.ASK_SECONDS
    absent_ranks._ARRIVAL_SECONDS, absent_ranks.ASK_SECONDS = 0.0, 0.01
    absent_ranks.logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        absent_ranks.logger.removeHandler(handler)
        absent_ranks._ARRIVAL_SECONDS, absent_ranks.ASK_SECONDS = limits


def wait_for(marker: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not marker.exists():
        assert time.monotonic() < deadline, f"{marker.name} never came"
        time.sleep(0.02)


def late_calls(world: World, root: str) -> dict[str, object]:
    """Each call is made by one rank first. The other makes it once the first has logged."""
    state = {"w": torch.ones(3)}
    managers: list[holdfast.CheckpointManager] = []

    def make() -> None:
        managers.append(holdfast.CheckpointManager(f"{root}/run"))

    calls: list[tuple[str, int, Callable[[], object]]] = [
        ("manager", 0, make),
        ("save by path", 0, lambda: holdfast.save(f"{root}/one", state)),
        ("save", 0, lambda: managers[0].save(1, state).wait()),
        ("load of a manager", 0, lambda: managers[0].load(state)),
        ("load by path", 1, lambda: holdfast.load(f"{root}/one", state)),
    ]
    logged: dict[str, object] = {}
    for name, first, call in calls:
        marker = Path(root) / f"{name}.logged"
        dist.barrier()
        if world.rank == first:
            with asking_at_once(marker) as lines:
                call()
            logged[name] = lines
        else:
            wait_for(marker)
            call()
    dist.barrier()
    return {"logged": logged, "steps": managers[0].steps(), "closed": _close_one_by_one(world, managers[0], Path(root))}


def _close_one_by_one(world: World, manager: holdfast.CheckpointManager, root: Path) -> bool:
    """Close the manager of rank 1 only once that of rank 0 is closed."""
    marker = root / "closed"
    if world.rank == 1:
        wait_for(marker)
    manager.close()
    marker.touch()
    return True
