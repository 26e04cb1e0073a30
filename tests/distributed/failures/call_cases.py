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
from holdfast.training.coordination import absent_ranks
from tests.support.gloo_worlds import World

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


def wrong_calls(world: World, root: str) -> dict[str, object]:
    """One rank makes calls that are wrong. Return what each raised on this rank, and the steps that were saved."""
    state: dict[str, object] = {"w": torch.ones(3)}
    raised: dict[str, list[str]] = {}

    with holdfast.CheckpointManager(f"{root}/wrong", every=1) as manager:
        manager.save(1, state).wait()
        calls: dict[str, Callable[[int, bool], object]] = {
            "save": lambda step, wrong: manager.save(step, None if wrong else state),  # type: ignore[arg-type]
            "negative step": lambda step, wrong: manager.save(-2 if wrong else step, state),
            "maybe_save": lambda step, wrong: manager.maybe_save(step, [] if wrong else state),  # type: ignore[arg-type]
            "save by path": lambda _, wrong: holdfast.save(f"{root}/two", [] if wrong else state),  # type: ignore[arg-type]
            "path": lambda _, wrong: holdfast.async_save(3 if wrong else f"{root}/two", state),  # type: ignore[arg-type]
        }
        for number, name in enumerate(calls):
            for failing in (0, 1):
                # Rank 0 raises before the other calls. By path it cannot: the first of those calls is a collective.
                is_first = world.rank == 0 and failing == 0 and "path" not in name
                if not is_first:
                    dist.barrier()
                try:
                    calls[name](2 + 2 * number + failing, world.rank == failing)
                except holdfast.InvalidError as error:
                    raised.setdefault(name, []).append(str(error))
                if is_first:
                    dist.barrier()
        manager.save(20, state).wait()
        return {"raised": raised, "steps": manager.steps()}


def overwrites(world: World, root: str) -> dict[str, object]:
    """Save over one path again and again, in the background and waited for; last, one rank says so and one does not.

    Return what was loaded after each wait, what differing calls raised, and the attempts that are left.
    """
    path, loaded = f"{root}/best", []
    settings = holdfast.Settings(collect_grace_seconds=0.0)
    weight = torch.zeros(3000)

    def save_three(first: int) -> None:
        handles = []
        for number in range(first, first + 3):
            weight.fill_(number)
            state = {"w": weight, "number": number}
            handles.append(holdfast.async_save(path, state, overwrite=True, settings=settings))
        for handle in handles:
            handle.wait()

    for first in (1, 4):
        save_three(first)
        state: dict[str, object] = {"w": torch.zeros(3000), "number": 0}
        holdfast.load(path, state)
        tensor = state["w"]
        assert isinstance(tensor, torch.Tensor)
        loaded.append([state["number"], *tensor.unique().tolist()])
        dist.barrier()
    raised = []
    for overwriting in (0, 1):
        dist.barrier()
        try:
            holdfast.save(path, {"w": weight}, overwrite=world.rank == overwriting, settings=settings)
        except holdfast.InvalidError as error:
            raised.append(str(error))
    holdfast.save(path, {"w": weight, "number": 7}, overwrite=True, settings=settings)
    dist.barrier()
    names = sorted(entry.name for entry in Path(path).iterdir())
    return {"loaded": loaded, "raised": raised, "attempts": len([name for name in names if len(name) == 16])}
